#: group: lio
#: about: riser finds and describes the disks of the kernel's target over TCP
#: limit: 300
SCHEME=iscsi
. /vm/lio.sh
find_and_describe
