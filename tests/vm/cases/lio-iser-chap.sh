#: group: lio
#: about: CHAP login of riser to the kernel's target over iSER, rejected with a wrong secret
#: limit: 300
SCHEME=iser
. /vm/lio.sh
chap_of_lio
