"""Private parts of torch, diffusers, transformers, accelerate and Gradio that Loft uses are there, and do what it needs.

An upgrade that fails one of these tests shows what has to be looked at; docs/private_api.md says where and why.
"""

from __future__ import annotations

import inspect
import re

import pytest

from backend.schema.paths import PROJECT

PAGE = PROJECT / "docs" / "private_api.md"
# What is private by its name, of other packages' modules. `_parameters`, `_buffers` and `_modules` of an nn.Module count too.
PRIVATE = re.compile(
    r"torch\._[a-z]\w*|torch\.\w+\._[a-z]\w*|torch\.\w+\.\w+\._[a-z]\w*|_C\._\w+"
    r"|from (?!backend|studio)[\w.]+ import _\w+|import_utils\._\w+|Variable\._\w+"
    r"|\._parameters\b|\._buffers\b|\._modules\b|\bre\._parser\b|gradio\.(?:state_holder|route_utils|routes)\b"
    r"|_files_to_close_on_error|find_packed_sequence_indices|fake_tensor\b"
)


def test_every_file_that_uses_private_parts_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    for package in ("backend", "studio"):
        for path in sorted((PROJECT / package).rglob("*.py")):
            code = "\n".join(line.partition("  # ")[0] for line in path.read_text(encoding="utf-8").splitlines())
            code = re.sub(r'""".*?"""', "", code, flags=re.DOTALL)
            name = path.relative_to(PROJECT).as_posix()
            found = PRIVATE.search(code)
            assert found is None or f"`{name}`" in text, f"{name} uses {found and found.group()}"


def test_the_page_names_only_files_that_are_there():
    for name in re.findall(r"`((?:backend|studio)/[\w/]+\.py)`", PAGE.read_text(encoding="utf-8")):
        assert (PROJECT / name).is_file(), name


def test_python_parses_regular_expressions_into_operations():
    (operation, value) = next(iter(re._parser.parse("(a+)*")))
    assert str(operation) == "MAX_REPEAT" and len(value) == 3


@pytest.mark.torch
def test_modules_keep_parameters_and_children_in_dicts():
    import torch

    layer = torch.nn.Linear(2, 3)
    layer._parameters["weight"] = torch.nn.Parameter(torch.ones(3, 2))
    assert layer.weight.sum() == 6 and layer._buffers == {} and layer._modules == {}


@pytest.mark.torch
def test_autograd_tells_whether_a_backward_pass_runs_and_calls_back_at_its_end():
    import torch
    from torch.autograd import Variable

    assert torch._C._current_graph_task_id() == -1
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch._C._current_graph_task_id())
            Variable._execution_engine.queue_callback(lambda: seen.append("end"))
            return gradient

    Watched.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen[0] != -1 and seen[1:] == ["end"]


@pytest.mark.torch
def test_the_hooks_of_saved_tensors_around_a_call_are_known():
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    top = torch._C._autograd._top_saved_tensors_default_hooks
    assert top(False) is None
    with saved_tensors_hooks(pack := (lambda tensor: tensor), lambda packed: packed):
        assert top(False)[0] is pack


@pytest.mark.torch
def test_kernels_that_torch_calls_private():
    import torch

    x = torch.ones(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    assert torch._scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)[0, 0] == 16
    values = [torch.zeros(2)]
    torch._foreach_lerp_(values, [torch.ones(2)], 0.25)
    assert values[0].tolist() == [0.25, 0.25]
    assert isinstance(torch.cpu._is_avx512_bf16_supported(), bool)
    assert isinstance(torch.cpu._is_amx_tile_supported(), bool)
    assert isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool | int)


@pytest.mark.torch
def test_all_convolutions_have_one_class():
    import torch
    from torch.nn.modules.conv import _ConvNd

    assert issubclass(torch.nn.Conv2d, _ConvNd) and issubclass(torch.nn.Conv3d, _ConvNd)


@pytest.mark.torch
def test_operations_are_seen_and_tensors_made_without_memory():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with FakeTensorMode():
        large = torch.empty(2**40, device="cuda")
        assert large.shape == (2**40,) and large.device.type == "cuda"
        with unset_fake_temporarily():
            assert torch.ones(1).item() == 1
    with Recorder():
        torch.ones(2) + 1
    assert any("add" in name for name in seen)


@pytest.mark.torch
def test_names_of_the_compiler():
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as shapes
    from torch._dynamo.exc import TorchDynamoException

    assert issubclass(TorchDynamoException, Exception)
    with shapes.patch(use_duck_shape=False):
        assert shapes.use_duck_shape is False
    with dynamo.patch(recompile_limit=3, force_nn_module_property_static_shapes=False):
        assert dynamo.recompile_limit == 3


@pytest.mark.torch
def test_switches_of_diffusers_and_transformers():
    from diffusers.utils import import_utils
    from transformers import masking_utils

    assert isinstance(import_utils._peft_available, bool)
    assert list(inspect.signature(masking_utils.find_packed_sequence_indices).parameters) == ["position_ids"]


@pytest.mark.torch
def test_accelerate_sorts_a_launchers_arguments():
    from accelerate.utils.launch import _filter_args

    assert list(inspect.signature(_filter_args).parameters) == ["args", "parser", "default_args"]


@pytest.mark.torch
def test_names_in_pickled_checkpoints():
    import torch

    assert callable(torch._utils._rebuild_tensor_v2) and callable(torch._utils._rebuild_parameter)


def test_gradio_keeps_sessions_and_uploads_where_loft_puts_its_own():
    import gradio as gr
    from gradio.route_utils import GradioMultiPartParser
    from gradio.routes import file_upload_statuses
    from gradio.state_holder import SessionState, StateHolder

    with gr.Blocks() as page:
        gr.Textbox()
    holder = StateHolder()
    holder.set_blocks(page)
    assert hasattr(holder, "session_data") and {"_update_config", "_update_value_in_config"} <= set(dir(SessionState))
    assert "config_values" in vars(SessionState(page))
    assert isinstance(page.fns, dict) and isinstance(page.upload_file_set, set) and callable(page.preprocess_data)
    assert hasattr(page, "state_session_capacity")
    assert {"track", "set_done"} <= set(dir(file_upload_statuses))
    assert "upload_progress" in inspect.signature(GradioMultiPartParser.__init__).parameters
    assert "_files_to_close_on_error" in inspect.getsource(inspect.getmodule(GradioMultiPartParser))
