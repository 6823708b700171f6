#: group: iscsi
#: about: CHAP with iscsi_tcp, one-way and mutual
#: limit: 300
TRANSPORT=tcp
. /vm/iscsi.sh
chap_both_ways
