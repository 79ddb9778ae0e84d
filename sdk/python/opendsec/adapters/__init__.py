# SPDX-License-Identifier: Apache-2.0
"""OpenDsec as the sandbox of other frameworks. Each module needs the extra of its name.

* ``opendsec.adapters.harbor``: an environment of Harbor (terminal-bench); ``opendsec[harbor]``
* ``opendsec.adapters.inspect_ai``: a sandbox provider of Inspect; ``opendsec[inspect]``
* ``opendsec.adapters.swerex``: a deployment of SWE-ReX; ``opendsec[swerex]``
* ``opendsec.adapters.mcp``: a server of the Model Context Protocol; ``opendsec[mcp]``
* ``opendsec.adapters.gymnasium``: a small environment to begin with; ``opendsec[gymnasium]``

They take the server's address and the key from the environment, as the command line does, and use
nothing of this package that a program of yours could not.
"""
