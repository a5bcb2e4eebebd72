"""What the makers say of each card: dense 16-bit products and memory bandwidth, by its exact name. No torch.

Sources: NVIDIA's architecture whitepapers (Pascal, Volta, Turing, GA102, Ada, Hopper, RTX Blackwell) and the datasheets
of its workstation and data-center cards; AMD's product pages and the Instinct datasheets; Intel's specifications of Arc
and Data Center GPUs; Apple's GPU cores and clocks, bandwidth as Apple states it. Laptop cards by cores and the highest
boost clock, which a thin laptop does not hold.

Teraflops are those of matrix units without sparsity, accumulated in 32 bits: GeForce cards do these at half the rate of
their 16-bit accumulation, workstation and data-center cards at the full one. Cards without matrix units have those of
their shaders.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache

from backend.schema.memory_plan import DTYPES

NO_BFLOAT16 = tuple(name for name in DTYPES if name != "bfloat16")  # NVIDIA before Ampere
APPLE = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class CardFacts:
    """One card as its maker describes it."""

    name: str
    gib: tuple[int, ...]  # of memory; the usual size first
    teraflops: float
    memory_gb: float  # a second, inside the card
    link_gb: float  # a second from RAM, as measured of such slots
    share: float  # of the maker's figure that a large network sustains at best
    device: str = "cuda:0"
    dtypes: tuple[str, ...] = DTYPES


# What networks reach of the maker's figure: FLUX.1-dev on an A100 takes 0.49 of it, Qwen-Image-Edit on an H200 0.57,
# Z-Image-Turbo on an RTX 3090, whose figure is that of half-rate accumulation, 0.93 (published runs; docs/plan.md). The
# range begins at the best.
HALF, FULL, SHADERS, OTHERS = 1.0, 0.58, 0.8, 0.45

# GiB, TFLOP/s, GB/s; a group: PCIe GB/s, share, device, dtypes
_GROUPS = (
    (6, SHADERS, "cuda:0", NO_BFLOAT16, """
        GT 1030|2|1.1|48; GTX 1050|2|1.9|112; GTX 1050 Ti|4|2.1|112; GTX 1060|6,3|4.4|192; GTX 1070|8|6.5|256; GTX 1070 Ti|8|8.2|256
        GTX 1080|8|8.9|320; GTX 1080 Ti|11|11.3|484; TITAN X Pascal|12|11|480; TITAN Xp|12|12.1|548
        Tesla P4|8|5.5|192; Tesla P40|24|11.8|346; Tesla P100|16,12|18.7|732; Tesla M40|24,12|6.8|288; Tesla M60|8|4.8|160; Tesla K80|12|4.1|240
        Quadro P1000|4|1.9|82; Quadro P2000|5|3|140; Quadro P2200|5|3.8|200; Quadro P4000|8|5.3|243; Quadro P5000|16|8.9|288; Quadro P6000|24|12.6|432
        GTX 1650|4|6|128; GTX 1650 SUPER|4|8.8|192; GTX 1650 Ti|4|6.1|192; GTX 1660|6|10|192; GTX 1660 SUPER|6|10|336; GTX 1660 Ti|6|10.9|288
        T400|4,2|2.2|80; T600|4|3.4|160; T1000|4,8|5|160; GTX 970|4|3.9|224; GTX 980|4|5|224; GTX 980 Ti|6|6.1|336
    """),
    (11, HALF, "cuda:0", NO_BFLOAT16, """
        RTX 2060|6,12|25.8|336; RTX 2060 SUPER|8|28.7|448; RTX 2070|8|29.9|448; RTX 2070 SUPER|8|36.3|448; RTX 2080|8|40.3|448
        RTX 2080 SUPER|8|44.6|496; RTX 2080 Ti|11,22|53.8|616; RTX 2060 Laptop|6|24|336; RTX 2070 Laptop|8|26.5|448; RTX 2070 SUPER Laptop|8|28|448
        RTX 2080 Laptop|8|37.4|384; RTX 2080 SUPER Laptop|8|38|448
    """),
    (11, FULL, "cuda:0", NO_BFLOAT16, """
        TITAN RTX|24|130.5|672; TITAN V|12|110|653; Tesla T4|16|65|320; Tesla V100|16,32|125|900; Quadro GV100|32|118.5|870
        Quadro RTX 3000|6|42.8|448; Quadro RTX 4000|8|57|416; Quadro RTX 5000|16|89.2|448; Quadro RTX 6000|24|130.5|672; Quadro RTX 8000|48|130.5|672
    """),
    (11, HALF, "cuda:0", DTYPES, """
        RTX 3050|8,6|18.2|224; RTX 3060|12,8|25.5|360; RTX 3060 Ti|8|32.4|448; RTX 3070|8|40.6|448; RTX 3070 Ti|8|43.5|608
        RTX 3080|10,12|59.5|760; RTX 3080 Ti|12|68.2|912; RTX 3090|24|71.2|936; RTX 3090 Ti|24|80|1008
        RTX 3050 Laptop|4,6|11|192; RTX 3050 Ti Laptop|4|13.5|192; RTX 3060 Laptop|6|21.9|336; RTX 3070 Laptop|8|31.9|448; RTX 3070 Ti Laptop|8|33.2|448
        RTX 3080 Laptop|8,16|38|448; RTX 3080 Ti Laptop|16|47.2|512; RTX 4060|8|30.2|272; RTX 4060 Ti|8,16|44.1|288
        RTX 4050 Laptop|6|24.3|192; RTX 4060 Laptop|8|29.1|256; RTX 4070 Laptop|8|40.1|256
    """),
    (22, HALF, "cuda:0", DTYPES, """
        RTX 4070|12|58.3|504; RTX 4070 SUPER|12|70.9|504; RTX 4070 Ti|12|80.2|504; RTX 4070 Ti SUPER|16|88.2|672; RTX 4080|16|97.5|717
        RTX 4080 SUPER|16|104.4|736; RTX 4090|24,48|165.2|1008; RTX 4090 D|24,48|147|1008; RTX 4080 Laptop|12|67.7|432; RTX 4090 Laptop|16|79.4|576
        RTX 5050|8|26.3|320; RTX 5060|8|38.4|448; RTX 5060 Ti|16,8|47.4|448; RTX 5050 Laptop|8|27|384; RTX 5060 Laptop|8|33|384; RTX 5070 Laptop|8|43|384
    """),
    (44, HALF, "cuda:0", DTYPES, """
        RTX 5070|12|61.7|672; RTX 5070 Ti|16|87.9|896; RTX 5080|16|112.6|960; RTX 5090|32|209.5|1792; RTX 5090 D|32|209.5|1792
        RTX 5070 Ti Laptop|12|52|672; RTX 5080 Laptop|16|70|896; RTX 5090 Laptop|24|90.7|896
    """),
    (22, FULL, "cuda:0", DTYPES, """
        RTX A400|4|10.8|96; RTX A1000|8|26.9|192; RTX A2000|6,12|31.9|288; RTX A4000|16|76.7|448; RTX A4500|20|94.6|640; RTX A5000|24|111.1|768
        RTX A5500|24|136.4|768; RTX A6000|48|154.8|768; RTX A1000 Laptop|4,6|25|192; RTX A2000 Laptop|4,8|37|192; RTX A3000 Laptop|6,12|51|264
        RTX A4000 Laptop|8|71|384; RTX A4500 Laptop|16|74|448; RTX A5000 Laptop|16|77|448; RTX A5500 Laptop|16|99|448
        A2|16|18|200; A10|24|125|600; A10G|24|70|600; A16|16|17.9|200; A30|24|165|933; A40|48|149.7|696; A100|80,40|312|2039; A800|80,40|312|2039
        RTX 2000 Ada|16|48|224; RTX 4000 Ada|20|106.9|360; RTX 4000 SFF Ada|20|76.7|280; RTX 4500 Ada|24|158.5|432; RTX 5000 Ada|32|261.1|576
        RTX 5880 Ada|48|277.1|960; RTX 6000 Ada|48|364.2|960; RTX 2000 Ada Laptop|8|58|256; RTX 3000 Ada Laptop|8|79.6|256; RTX 3500 Ada Laptop|12|92|432
        RTX 4000 Ada Laptop|12|134|432; RTX 5000 Ada Laptop|16|170|576; L2|24|96.5|300; L4|24|121|300; L20|48|119.5|864; L40|48|181|864; L40S|48|362|864
    """),
    (44, FULL, "cuda:0", DTYPES, """
        H100|80|989.4|3350; H100 PCIe|80|756|2039; H100 NVL|94|835|3938; H800|80|989.4|3350; H20|96,141|148|4000; H200|141|989.4|4800; H200 NVL|141|835|4800
        GH200|96,144|989.4|4000; B100|192|1750|8000; B200|180,192|2250|7700; B300|288,268|2250|8000; GB200|186,192|2500|8000; GB300|288|2500|8000; GB10|128|125|273
        RTX PRO 6000 Blackwell Workstation Edition|96|503.8|1792; RTX PRO 6000 Blackwell Max-Q Workstation Edition|96|438.9|1792
        RTX PRO 6000 Blackwell Server Edition|96|483.6|1597; RTX PRO 5000 Blackwell|48,72|258|1344; RTX PRO 4500 Blackwell|32|210.9|896
        RTX PRO 4000 Blackwell|24|147.3|672; RTX PRO 4000 Blackwell SFF Edition|24|96.3|432; RTX PRO 2000 Blackwell|16|68.1|288
        RTX PRO 5000 Blackwell Laptop|24|228|896; RTX PRO 4000 Blackwell Laptop|16|160|896; RTX PRO 3000 Blackwell Laptop|12|120|672
    """),
    (11, SHADERS * 0.75, "cuda:0", DTYPES, """
        RX 6400|4|7.1|128; RX 6500 XT|4|11.5|144; RX 6600|8|17.9|224; RX 6600 XT|8|21.2|256; RX 6650 XT|8|21.6|280; RX 6700|10|22.6|320; RX 6700 XT|12|26.4|384
        RX 6750 XT|12|26.6|432; RX 6800|16|32.3|512; RX 6800 XT|16|41.5|512; RX 6900 XT|16|46.1|512; RX 6950 XT|16|47.3|576; PRO W6600|8|20.8|224; PRO W6800|32|35.7|512
        Radeon VII|16|26.9|1024; Instinct MI50|16,32|26.5|1024; Instinct MI60|32|29.5|1024
    """),
    (22, OTHERS, "cuda:0", DTYPES, """
        RX 7600|8|43.5|288; RX 7600 XT|16|45.1|288; RX 7700 XT|12|70.3|432; RX 7800 XT|16|74.7|624; RX 7900 GRE|16|92|576; RX 7900 XT|20|103|800
        RX 7900 XTX|24|122.8|960; PRO W7600|8|39.9|288; PRO W7700|16|56.5|576; PRO W7800|32,48|90.5|576; PRO W7900|48|122.6|864; Radeon 8060S|96|59.4|256
        RX 9060|8|86|288; RX 9060 XT|16,8|103|320; RX 9070 GRE|12|137|432; RX 9070|16|145|640; RX 9070 XT|16|195|640; AI PRO R9700|32|191|640
        Instinct MI100|32|184.6|1229; Instinct MI210|64|181|1638; Instinct MI250|64|181|1638; Instinct MI250X|64|191.5|1638
    """),
    (44, OTHERS, "cuda:0", DTYPES, """
        Instinct MI300A|128|980.6|5300; Instinct MI300X|192|1307.4|5300; Instinct MI325X|256|1307.4|6000; Instinct MI350X|288|2306.9|8000
        Instinct MI355X|288|2516.6|8000
    """),
    (11, OTHERS, "xpu:0", DTYPES, """
        Arc A310|4|24.6|124; Arc A380|6|33.6|186; Arc A580|8|98.3|512; Arc A750|8|114.7|512; Arc A770|16,8|131|560; Arc A770M|16|118|512
        Arc B570|10|101.5|380; Arc B580|12|116.5|456; Arc Pro A60|12|80|384; Arc Pro B50|16|85|224; Arc Pro B60|24|98.5|456
    """),
    (22, OTHERS, "xpu:0", DTYPES, """
        Data Center GPU Max 1100|48|352|1229; Data Center GPU Max 1550|128|832|3277; Data Center GPU Flex 170|16|125|576
    """),
    (40, 0.7, "mps", APPLE, """
        Apple M1|16,8|2.6|68; Apple M1 Pro|32,16|5.2|200; Apple M1 Max|64,32|10.4|400; Apple M1 Ultra|128,64|21|800
        Apple M2|24,8,16|3.6|100; Apple M2 Pro|32,16|6.8|200; Apple M2 Max|96,32,64|13.5|400; Apple M2 Ultra|192,64,128|27.2|800
        Apple M3|24,8,16|4.1|100; Apple M3 Pro|36,18|7.4|150; Apple M3 Max|128,36,48,64,96|16.4|400; Apple M3 Ultra|512,96,256|32.8|819
        Apple M4|32,16,24|4.3|120; Apple M4 Pro|64,24,48|8.6|273; Apple M4 Max|128,36,48,64|17.2|546; Apple M5|32,16,24|4.2|153
    """),
)  # fmt: skip
# words of drivers that name no model
_NOISE = re.compile(
    r"\((?:r|tm|c)\)|®|™|\bnvidia\b|\bgeforce\b|\bamd\b|\bati\b|\bradeon\b|\bintel\b|\bgraphics\b|\bgpu\b|\bgeneration\b|\bsxm\d?\b|\bhbm\w*|\boem\b"
    r"|\b\d+\s*cores?\b|\bcorporation\b|\bwith\b|\bdesign\b"
)
_SIZE = re.compile(r"[-\s]?\b(\d+)\s*(?:gib|gb|g)\b")
# what people leave out of a name
_OPTIONAL = ("geforce", "rtx", "gtx", "rx", "arc", "instinct", "tesla", "radeon", "apple", "quadro")


def key_of(name: str) -> str:
    """A card's name as it is looked up: without makers' words, sizes, spaces and signs."""
    word = _NOISE.sub(" ", _SIZE.sub(" ", name.lower()))
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\bmax-?q\b(?! workstation)", "laptop", word))


def gib_of(name: str) -> int:
    """The GiB that a card's name says; 0 where it says none."""
    found = _SIZE.search(name.lower())
    return int(found.group(1)) if found else 0


@lru_cache(maxsize=1)
def known() -> dict[str, CardFacts]:
    """Key -> card, for every card that is known."""
    found = {}
    for link, share, device, dtypes, rows in _GROUPS:
        for row in filter(None, (one.strip() for one in re.split(r"[;\n]", rows))):
            name, gib, teraflops, memory = row.split("|")
            sizes = tuple(int(one) for one in gib.split(","))
            found[key_of(name)] = CardFacts(name, sizes, float(teraflops), float(memory), link, share, device, dtypes)
    return found


@lru_cache(maxsize=1)
def spellings() -> dict[str, CardFacts]:
    """Every way to say a known card: as drivers do, and without words that people leave out, where that names one card
    alone."""
    found, short = dict(known()), {}
    for key, card in known().items():
        words = [word for word in re.split(r"[^a-z0-9]+", card.name.lower()) if word]
        # a Quadro RTX 6000 and an RTX 6000 Ada are other cards, and both are called RTX 6000
        optional = () if "quadro" in words and "rtx" in words else _OPTIONAL
        more = () if "apple" in words else ("pro",)  # an M1 is no M1 Pro
        for left_out in (optional, (*optional, *more)):
            short.setdefault(key_of(" ".join(word for word in words if word not in left_out)), set()).add(card)
        for end in ("workstationedition", "blackwell", "blackwellworkstationedition"):
            if key.endswith(end) and "max" not in key:
                short.setdefault(key.removesuffix(end), set()).add(card)
    return {key: next(iter(cards)) for key, cards in short.items() if key and len(cards) == 1} | found


def card_named(name: str) -> CardFacts | None:
    """The card of exactly this name, as a driver or a person writes it; None for one that is not known."""
    key = key_of(name)
    found = spellings().get(key)
    if found is None and key.endswith("pcie"):
        found = spellings().get(key.removesuffix("pcie"))
    return found


def nearest(name: str, count: int = 3) -> tuple[str, ...]:
    """Names of known cards that are written most alike."""
    close = difflib.get_close_matches(key_of(name), list(spellings()), n=3 * count, cutoff=0.5)
    return tuple(dict.fromkeys(spellings()[key].name for key in close))[:count]
