# SPDX-License-Identifier: Apache-2.0
"""The program that serves E2B's code interpreter protocol from inside a sandbox.

It is copied into the template ``code-interpreter-v1`` and runs there (``python3 -m
code_interpreter``); the SDK never imports it. Code runs in Jupyter kernels, one for each context.

Modules: ``app`` (the HTTP routes), ``contexts`` (which kernels there are), ``kernels`` (one of
them, and what runs in it), ``languages`` (what differs between languages), ``messages`` (Jupyter's
messages as the lines that clients read), ``python_startup`` (runs in each Python kernel).
"""
