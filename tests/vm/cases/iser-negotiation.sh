#: group: iser
#: about: verified I/O of ib_iser with all combinations of settings for data transfers
#: limit: 600
TRANSPORT=iser
. /vm/iscsi.sh
every_negotiation
