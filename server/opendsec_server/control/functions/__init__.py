# SPDX-License-Identifier: AGPL-3.0-only
"""Function calls: short stateless calls on workers that are there already.

A pool belongs to one project and has workers, which are ordinary sandboxes of that project. A call
takes an idle worker, runs in a process of its own there, and leaves nothing behind. Calls wait in
queues with bounds, and projects share the workers of the installation fairly.
"""
