#: group: lio
#: about: riser proves who it is to the kernel's target over iSER, and is refused otherwise
#: limit: 300
SCHEME=iser
. /vm/lio.sh
chap_of_lio
