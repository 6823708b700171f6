#: group: iser
#: about: open-iscsi with ib_iser finds the target, logs in, verifies, logs out
#: limit: 240
#: short: yes
TRANSPORT=iser
. /vm/iscsi.sh
discover_and_login
