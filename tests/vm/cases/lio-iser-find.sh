#: group: lio
#: about: riser discovers and inspects disks of the kernel's target over iSER
#: limit: 300
SCHEME=iser
. /vm/lio.sh
find_and_describe
