#: group: iscsi
#: about: verified I/O of iscsi_tcp with every combination of what decides how data travel
#: limit: 600
TRANSPORT=tcp
. /vm/iscsi.sh
every_negotiation
