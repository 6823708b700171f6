#: group: targetcli
#: about: one session of targetcli, and the answers of the files it makes, on LIO and on riserd, which the kernel's initiators use
#: limit: 1800
TRANSPORT=tcp
. /vm/iscsi.sh
. /vm/targetcli.sh
serve_by_targetcli
