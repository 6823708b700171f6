#: group: iser
#: about: CHAP with ib_iser, one-way and mutual
#: limit: 300
TRANSPORT=iser
. /vm/iscsi.sh
chap_both_ways
