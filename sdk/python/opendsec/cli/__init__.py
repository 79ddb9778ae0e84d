# SPDX-License-Identifier: Apache-2.0
"""The command line ``opendsec``. Each command's module is loaded when it is used."""
