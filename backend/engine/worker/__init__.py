"""The worker's protocol on stdin and stdout, and its commands.

Read: loaded_plan, protocol, commands, fake.
Public: commands, fake, protocol.
"""
