#: group: iser
#: about: ib_iser proves who it is, and has riserd prove it
#: limit: 300
TRANSPORT=iser
. /vm/iscsi.sh
chap_both_ways
