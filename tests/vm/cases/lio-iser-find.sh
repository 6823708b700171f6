#: group: lio
#: about: riser finds and describes the disks of the kernel's target over iSER
#: limit: 300
SCHEME=iser
. /vm/lio.sh
find_and_describe
