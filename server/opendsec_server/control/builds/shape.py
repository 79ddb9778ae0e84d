# SPDX-License-Identifier: AGPL-3.0-only
"""What a build has come to after some steps, and what the cached result of a step hangs on."""

from __future__ import annotations

import hashlib
import posixpath
import re
import shlex

import msgspec

from opendsec_server.contract.errors import BuildFailed
from opendsec_server.contract.images import ImageConfig, ReadyCheck, StartCommand
from opendsec_server.contract.limits import ENV_BYTES_MAX

from .plan import BuildPlan, BuildStep
from .words import DEFAULT_PATH, BadWord, expand

BUILDER_VERSION = 1
"""Counted up when a step would do something else: cached results of before are not used then."""
STEP_CHARS_MAX = 1 << 20
"""All words of a step, with the variables' values in them."""
E2B_USER = "user"
E2B_HOME = "/home/user"

_LOGIN_SHELL = 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; fi; exec /bin/sh -l -c "$1"'
_WAIT_FOR_PORT_RE = re.compile(
    r'\[ -n "\$\(ss (?:-tuln \| grep |-Htuln sport = ):([0-9]{1,5})\)" \]'
)
"""The commands that E2B's clients write for ``wait_for_port``. Images without ``ss`` are many, and
the guest agent can look by itself."""

ADD_USER = r"""
set -eu
name=$1
has() { while IFS=: read -r first _; do [ "$first" != "$1" ] || return 0; done <"$2"; return 1; }
taken() { while IFS=: read -r _ _ number _; do [ "$number" != "$1" ] || return 0; done <"$2"
  return 1; }
mkdir -p /etc
for file in passwd group; do [ -e "/etc/$file" ] || : >"/etc/$file"; done
has root /etc/passwd || echo "root:x:0:0:root:/root:/bin/sh" >>/etc/passwd
has root /etc/group || echo "root:x:0:" >>/etc/group
if has "$name" /etc/passwd; then exit 0; fi
id=1000
while taken "$id" /etc/passwd || taken "$id" /etc/group; do id=$((id + 1)); done
shell=/bin/sh
[ ! -x /bin/bash ] || shell=/bin/bash
echo "$name:x:$id:$id::/home/$name:$shell" >>/etc/passwd
has "$name" /etc/group || echo "$name:x:$id:" >>/etc/group
[ ! -e /etc/shadow ] || echo "$name:*:19000:0:99999:7:::" >>/etc/shadow
mkdir -p "/home/$name" /etc/sudoers.d
[ ! -d /etc/skel ] || cp -R /etc/skel/. "/home/$name/"
chown -R "$id:$id" "/home/$name"
echo "$name ALL=(ALL:ALL) NOPASSWD: ALL" >"/etc/sudoers.d/$name"
chmod 440 "/etc/sudoers.d/$name"
"""
"""Makes a user with plain sh: distributions have no tool for it in common."""


class Shape(msgspec.Struct, kw_only=True, frozen=True):
    """An image on the way to a template."""

    image: str
    """Digest."""
    config: ImageConfig = ImageConfig()
    user: str = "root"
    workdir: str | None = None
    env: dict[str, str] = {}
    args: dict[str, str] = {}
    """Of ``ARG``: for the commands of this build only."""
    directories: tuple[tuple[str, str], ...] = ()
    """Working directories with their owners that the next step makes if they are missing."""
    users: tuple[str, ...] = ()
    """Users that the next step makes if they are missing."""
    start: StartCommand | None = None
    """Of the template it stands on."""

    @property
    def pending(self) -> bool:
        """Whether something is still to be made."""
        return bool(self.directories or self.users)

    @property
    def image_config(self) -> ImageConfig:
        """Configuration of the image as it is now."""
        return msgspec.structs.replace(
            self.config, env=self.env, workdir=self.workdir, user=self.user
        )

    def on(self, image: str) -> Shape:
        """The same on a new image, in which everything is made."""
        return msgspec.structs.replace(self, image=image, directories=(), users=())


def configured(shape: Shape, step: BuildStep, *, e2b: bool) -> Shape:
    """The shape after a step that makes nothing by itself.

    Raises:
        BuildFailed: a quote or brace in it is not closed.
    """
    args, replace = words_of(shape, step, e2b=e2b), msgspec.structs.replace
    config = shape.config
    match step.type:
        case "ENV":
            return replace(shape, env=_joined(shape.env, args, step))
        case "ARG":
            return replace(shape, args=_joined(shape.args, args, step))
        case "WORKDIR":
            path = absolute(shape, args[0])
            owner = shape.user if e2b else "root"
            return replace(shape, workdir=path, directories=(*shape.directories, (path, owner)))
        case "USER":
            users = (*shape.users, args[0]) if e2b and args[0] != "root" else shape.users
            return replace(shape, user=args[0], users=users)
        case "LABEL":
            return replace(shape, config=replace(config, labels=_joined(config.labels, args, step)))
        case "EXPOSE":
            ports = [port if "/" in port else f"{port}/tcp" for port in args]
            every = tuple(dict.fromkeys((*config.exposed_ports, *ports)))
            return replace(shape, config=replace(config, exposed_ports=every))
        case "STOPSIGNAL":
            return replace(shape, config=replace(config, stop_signal=args[0]))
        case "CMD":
            return replace(shape, config=replace(config, cmd=args))
        case "ENTRYPOINT":
            # An image's own CMD is of its own ENTRYPOINT.
            return replace(shape, config=replace(config, entrypoint=args, cmd=()))
    raise AssertionError(step.type)


def _joined(old: dict[str, str], args: tuple[str, ...], step: BuildStep) -> dict[str, str]:
    joined = {**old, **dict(zip(args[::2], args[1::2], strict=False))}
    if sum(len(name) + len(value) for name, value in joined.items()) > ENV_BYTES_MAX:
        raise BuildFailed(f"{step.type}: all names and values have more than {ENV_BYTES_MAX} bytes")
    return joined


def words_of(shape: Shape, step: BuildStep, *, e2b: bool) -> tuple[str, ...]:
    """A step's arguments with the variables' values in them.

    Raises:
        BuildFailed: a quote or brace is not closed.
    """
    variables = {"PATH": DEFAULT_PATH, **shape.args, **shape.env}
    if step.type in ("CMD", "ENTRYPOINT") or (e2b and step.type != "ENV"):
        return step.args
    names = step.type in ("ENV", "ARG", "LABEL")
    words, size = [], 0
    try:
        for number, arg in enumerate(step.args):
            word = arg if names and number % 2 == 0 else expand(arg, variables, quotes=not e2b)
            words.append(word)
            size += len(word)
            if size > STEP_CHARS_MAX:
                raise BadWord(f"it has more than {STEP_CHARS_MAX} characters")
        return tuple(words)
    except BadWord as exc:
        place = "" if step.line is None else f"line {step.line}: "
        raise BuildFailed(f"{place}{step.type}: {exc}") from exc


def absolute(shape: Shape, path: str) -> str:
    """A path as seen from the working directory. A trailing ``/`` stays."""
    joined = posixpath.join(shape.workdir or "/", path)
    normal = "/" + posixpath.normpath(joined).lstrip("/")
    return f"{normal}/" if joined.endswith("/") and normal != "/" else normal


def key_of(shape: Shape, what: tuple[object, ...], *, with_args: bool) -> str:
    """What the result of a step on a shape hangs on, as SHA-256.

    Args:
        shape: Before the step.
        what: The step itself and its inputs.
        with_args: ``ARG`` values count: a command sees them.
    """
    text = msgspec.json.encode(
        (
            BUILDER_VERSION,
            shape.image,
            shape.user,
            shape.workdir,
            shape.env,
            shape.args if with_args else {},
            shape.directories,
            shape.users,
            what,
        ),
        order="deterministic",
    )
    return hashlib.sha256(text).hexdigest()


def command_argv(command: str, *, e2b: bool) -> tuple[str, ...]:
    """How a command line is run."""
    if e2b:
        return ("/bin/sh", "-c", _LOGIN_SHELL, "sh", command)
    return ("/bin/sh", "-c", command)


def prepare_argv(shape: Shape) -> tuple[str, ...]:
    """Makes the users and directories that are pending."""
    lines = [ADD_USER_FUNCTION] if shape.users else []
    lines += [f"add_user {shlex.quote(name)}" for name in shape.users]
    for path, owner in shape.directories:
        place, whose = shlex.quote(path), shlex.quote(owner)
        # A colon gives it to the user's group too; ids without an entry have none.
        give = f"{{ chown {whose}: {place} || chown {whose} {place}; }}"
        make = f"mkdir -p {place}" if owner == "root" else f"{{ mkdir -p {place} && {give}; }}"
        lines.append(f"[ -d {place} ] || {make}")
    return ("/bin/sh", "-ec", "\n".join(lines))


ADD_USER_FUNCTION = f"add_user() ({ADD_USER})"


def start_of(plan: BuildPlan, shape: Shape) -> StartCommand | None:
    """The start command of the template: the plan's, else that of the template below."""
    argv: tuple[str, ...] = ()
    if plan.start_image:
        argv = (*shape.config.entrypoint, *shape.config.cmd)
    elif plan.start_cmd:
        argv = command_argv(plan.start_cmd, e2b=plan.style == "e2b")
    if not argv:
        return shape.start
    return StartCommand(
        argv=argv,
        user=shape.user,
        workdir=shape.workdir,
        ready=ready_check(plan.ready_cmd),
    )


def ready_check(command: str | None) -> ReadyCheck:
    """When a start command counts as up."""
    if not command:
        return ReadyCheck()
    port = _WAIT_FOR_PORT_RE.fullmatch(command.strip())
    if port is not None and 1 <= int(port[1]) <= 65_535:
        return ReadyCheck(port=int(port[1]))
    return ReadyCheck(command=command)
