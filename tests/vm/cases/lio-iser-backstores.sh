#: group: lio
#: about: riser writes, flushes and loses sessions over iser, on fileio, block and ramdisk with write cache and FUA on and off
#: limit: 900
SCHEME=iser
CAPTURED="-s 1000 -c 100000 udp port 4791"
. /vm/backstores.sh
all_backstores
