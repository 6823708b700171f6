#: group: targetcli
#: about: a targetcli session and the contents of its files, with LIO and with riserd, which is then used by the kernel's initiators
#: limit: 1800
TRANSPORT=tcp
. /vm/iscsi.sh
. /vm/targetcli.sh
serve_by_targetcli
