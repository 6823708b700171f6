#: group: tgt
#: about: verified I/O of riser from 512 B to 512 KiB into tgt over iSER, on both providers
#: limit: 400
. /vm/tgt.sh
HOST_IQN=iqn.2026-01.com.example:riser
tgt_rig $HOST_IQN
URL="iser://10.99.0.1/$TGT_IQN/1?initiator=$HOST_IQN"
for provider in roce rdma_core; do
    echo "--- $provider"
    riser_on $provider inquiry "$URL"
    verified_bench $provider "$URL" 512 1M 16M
    verified_bench $provider "$URL" 4K 8M 16M
    verified_bench $provider "$URL" 128K 24M 16M
    verified_bench $provider "$URL" 512K 24M 16M
    refused $provider 5 "no such logical unit" read "iser://10.99.0.1/$TGT_IQN/9?initiator=$HOST_IQN"
    refused $provider 3 'log in' read "iser://10.99.0.1/$TGT_IQN/1?initiator=iqn.2026-01.com.example:nobody"
done
