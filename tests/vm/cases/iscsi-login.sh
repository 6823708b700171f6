#: group: iscsi
#: about: open-iscsi with iscsi_tcp finds the target, logs in, verifies, logs out
#: limit: 240
#: short: yes
TRANSPORT=tcp
. /vm/iscsi.sh
discover_and_login
