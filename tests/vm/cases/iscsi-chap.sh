#: group: iscsi
#: about: iscsi_tcp proves who it is, and has riserd prove it
#: limit: 300
TRANSPORT=tcp
. /vm/iscsi.sh
chap_both_ways
