#: group: srp
#: about: with and without immediate data, registration always and never
#: limit: 600
for imm in Y N; do
    for register in Y N; do
        srp_rig 32 1 use_imm_data=$imm register_always=$register never_register=$([ $register = N ] && echo Y || echo N) prefer_fr=$register
        srp_login ch_count=1
        verify "$DISK" 8m --bsrange=512-512k --iodepth=8
        srp_logout
        stop_serving
        srp_clean
    done
done
trap - EXIT
