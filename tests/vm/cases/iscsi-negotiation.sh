#: group: iscsi
#: about: verified I/O of iscsi_tcp with all combinations of settings for data transfers
#: limit: 600
TRANSPORT=tcp
. /vm/iscsi.sh
every_negotiation
