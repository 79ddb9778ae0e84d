#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs in the guest, from the seed disk, at every boot: installs the guest agent as a service.
# Usage: guest_service.sh SEED   (the mounted seed)
seed=$1
agent=/usr/local/sbin/opendsec-agent

say() { echo "opendsec: $*" >/dev/console 2>/dev/null || true; }

mkdir -p /usr/local/sbin
if ! cmp -s "$seed/opendsec-agent" "$agent"; then
  # Another name first: a running program cannot be written to.
  cp "$seed/opendsec-agent" "$agent.new" && chmod 0755 "$agent.new" && mv "$agent.new" "$agent" ||
    say "the agent could not be installed"
fi
if command -v restorecon >/dev/null 2>&1; then restorecon "$agent"; fi

if ! id user >/dev/null 2>&1; then
  shell=/bin/sh
  if [ -x /bin/bash ]; then shell=/bin/bash; fi
  useradd --create-home --shell "$shell" user 2>/dev/null || adduser -D -s "$shell" user ||
    say "the user could not be made"
  if [ -d /etc/sudoers.d ]; then
    echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' >/etc/sudoers.d/opendsec-user
    chmod 0440 /etc/sudoers.d/opendsec-user
  fi
fi

trusted=/usr/local/share/ca-certificates
anchors=/etc/pki/ca-trust/source/anchors
new=
for pem in "$seed"/opendsec-node-*.crt; do
  if [ ! -s "$pem" ] || cmp -s "$pem" "$trusted/${pem##*/}"; then continue; fi
  new=1
  mkdir -p "$trusted" && cp "$pem" "$trusted/"
  if [ -d "$anchors" ]; then cp "$pem" "$anchors/"; fi
  # update-ca-certificates would take half a minute on a slow machine, and finds them later.
  bundle=/etc/ssl/certs/ca-certificates.crt
  if [ -f "$bundle" ] && [ ! -L "$bundle" ]; then cat "$pem" >>"$bundle"; fi
done
if [ -n "$new" ] && [ -d "$anchors" ]; then update-ca-trust >/dev/null 2>&1 & fi

if [ -d /run/systemd/system ]; then
  unit=/etc/systemd/system/opendsec-agent.service
  cat >"$unit.new" <<UNIT
[Unit]
Description=OpenDsec guest agent
# By default after basic.target: what a command may expect (D-Bus, temporary files) is there.

[Service]
ExecStart=$agent --service
Restart=always
RestartSec=1
OOMScoreAdjust=-1000
TasksMax=infinity
LimitNOFILE=16384:1048576
StandardError=journal+console

[Install]
WantedBy=multi-user.target
UNIT
  if cmp -s "$unit.new" "$unit"; then
    rm -f "$unit.new"
  else
    mv "$unit.new" "$unit"
    mkdir -p /etc/systemd/system/multi-user.target.wants
    ln -sf "$unit" /etc/systemd/system/multi-user.target.wants/opendsec-agent.service
    systemctl daemon-reload
  fi
  systemctl start --no-block opendsec-agent.service
elif [ -x /sbin/openrc-run ]; then
  cat >/etc/init.d/opendsec-agent <<SERVICE
#!/sbin/openrc-run
description="OpenDsec guest agent"
supervisor=supervise-daemon
command=$agent
command_args=--service
SERVICE
  chmod 0755 /etc/init.d/opendsec-agent
  rc-update add opendsec-agent default >/dev/null 2>&1
  rc-service opendsec-agent start
else
  cat >/etc/init.d/opendsec-agent <<SERVICE
#!/bin/sh
### BEGIN INIT INFO
# Provides: opendsec-agent
# Required-Start: \$local_fs
# Required-Stop:
# Default-Start: 2 3 4 5
# Default-Stop: 0 1 6
# Short-Description: OpenDsec guest agent
### END INIT INFO
case "\$1" in
  start) start-stop-daemon --start --background --exec $agent -- --service ;;
  stop) start-stop-daemon --stop --exec $agent ;;
  restart) "\$0" stop; "\$0" start ;;
esac
SERVICE
  chmod 0755 /etc/init.d/opendsec-agent
  if command -v update-rc.d >/dev/null 2>&1; then update-rc.d opendsec-agent defaults; fi
  if command -v chkconfig >/dev/null 2>&1; then chkconfig --add opendsec-agent; fi
  /etc/init.d/opendsec-agent start
fi
