#: group: targetcli
#: about: one session of targetcli, and every attribute, on LIO and on riserd, which the kernel's initiators use
#: limit: 1800
TRANSPORT=tcp
. /vm/iscsi.sh
. /vm/targetcli.sh
serve_by_targetcli
