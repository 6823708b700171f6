#: group: iser
#: about: verified I/O of ib_iser with every combination of what decides how data travel
#: limit: 600
TRANSPORT=iser
. /vm/iscsi.sh
every_negotiation
