#: group: lio
#: about: riser discovers and inspects disks of the kernel's target over TCP
#: limit: 300
SCHEME=iscsi
. /vm/lio.sh
find_and_describe
