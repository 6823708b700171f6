//! Human-readable names of values, and rates.

use std::ffi::{CStr, c_char, c_int};

use riser_rdma_core_sys::bindings::*;

fn name(table: &'static [(u32, &'static CStr)], value: u32) -> *const c_char {
    let known = table.iter().find(|(v, _)| *v == value);
    known.map_or(c"unknown", |(_, name)| name).as_ptr()
}

/// `ibv_node_type_str(3)`.
pub(crate) extern "C" fn ibv_node_type_str(value: ibv_node_type) -> *const c_char {
    const NAMES: &[(i32, &CStr)] = &[
        (IBV_NODE_CA, c"InfiniBand channel adapter"),
        (IBV_NODE_SWITCH, c"InfiniBand switch"),
        (IBV_NODE_ROUTER, c"InfiniBand router"),
        (IBV_NODE_RNIC, c"iWARP NIC"),
        (IBV_NODE_USNIC, c"usNIC"),
        (IBV_NODE_USNIC_UDP, c"usNIC UDP"),
    ];
    let known = NAMES.iter().find(|(v, _)| *v == value);
    known.map_or(c"unknown", |(_, name)| name).as_ptr()
}

/// `ibv_port_state_str(3)`.
pub(crate) extern "C" fn ibv_port_state_str(value: ibv_port_state) -> *const c_char {
    name(
        &[
            (IBV_PORT_NOP, c"no state change (NOP)"),
            (IBV_PORT_DOWN, c"down"),
            (IBV_PORT_INIT, c"init"),
            (IBV_PORT_ARMED, c"armed"),
            (IBV_PORT_ACTIVE, c"active"),
            (IBV_PORT_ACTIVE_DEFER, c"active defer"),
        ],
        value,
    )
}

/// `ibv_event_type_str(3)`.
pub(crate) extern "C" fn ibv_event_type_str(value: ibv_event_type) -> *const c_char {
    name(
        &[
            (IBV_EVENT_CQ_ERR, c"CQ error"),
            (IBV_EVENT_QP_FATAL, c"local work queue catastrophic error"),
            (
                IBV_EVENT_QP_REQ_ERR,
                c"invalid request local work queue error",
            ),
            (
                IBV_EVENT_QP_ACCESS_ERR,
                c"local access violation work queue error",
            ),
            (IBV_EVENT_COMM_EST, c"communication established"),
            (IBV_EVENT_SQ_DRAINED, c"send queue drained"),
            (IBV_EVENT_PATH_MIG, c"path migrated"),
            (IBV_EVENT_PATH_MIG_ERR, c"path migration request error"),
            (IBV_EVENT_DEVICE_FATAL, c"local catastrophic error"),
            (IBV_EVENT_PORT_ACTIVE, c"port active"),
            (IBV_EVENT_PORT_ERR, c"port error"),
            (IBV_EVENT_LID_CHANGE, c"LID change"),
            (IBV_EVENT_PKEY_CHANGE, c"P_Key change"),
            (IBV_EVENT_SM_CHANGE, c"SM change"),
            (IBV_EVENT_SRQ_ERR, c"SRQ catastrophic error"),
            (IBV_EVENT_SRQ_LIMIT_REACHED, c"SRQ limit reached"),
            (IBV_EVENT_QP_LAST_WQE_REACHED, c"last WQE reached"),
            (IBV_EVENT_CLIENT_REREGISTER, c"client reregistration"),
            (IBV_EVENT_GID_CHANGE, c"GID table change"),
            (IBV_EVENT_WQ_FATAL, c"WQ fatal"),
        ],
        value,
    )
}

/// `ibv_wc_status_str(3)`.
pub(crate) extern "C" fn ibv_wc_status_str(value: ibv_wc_status) -> *const c_char {
    name(
        &[
            (IBV_WC_SUCCESS, c"success"),
            (IBV_WC_LOC_LEN_ERR, c"local length error"),
            (IBV_WC_LOC_QP_OP_ERR, c"local QP operation error"),
            (IBV_WC_LOC_EEC_OP_ERR, c"local EE context operation error"),
            (IBV_WC_LOC_PROT_ERR, c"local protection error"),
            (IBV_WC_WR_FLUSH_ERR, c"Work Request Flushed Error"),
            (IBV_WC_MW_BIND_ERR, c"memory management operation error"),
            (IBV_WC_BAD_RESP_ERR, c"bad response error"),
            (IBV_WC_LOC_ACCESS_ERR, c"local access error"),
            (IBV_WC_REM_INV_REQ_ERR, c"remote invalid request error"),
            (IBV_WC_REM_ACCESS_ERR, c"remote access error"),
            (IBV_WC_REM_OP_ERR, c"remote operation error"),
            (IBV_WC_RETRY_EXC_ERR, c"transport retry counter exceeded"),
            (IBV_WC_RNR_RETRY_EXC_ERR, c"RNR retry counter exceeded"),
            (IBV_WC_LOC_RDD_VIOL_ERR, c"local RDD violation error"),
            (IBV_WC_REM_INV_RD_REQ_ERR, c"remote invalid RD request"),
            (IBV_WC_REM_ABORT_ERR, c"aborted error"),
            (IBV_WC_INV_EECN_ERR, c"invalid EE context number"),
            (IBV_WC_INV_EEC_STATE_ERR, c"invalid EE context state"),
            (IBV_WC_FATAL_ERR, c"fatal error"),
            (IBV_WC_RESP_TIMEOUT_ERR, c"response timeout error"),
            (IBV_WC_GENERAL_ERR, c"general error"),
            (IBV_WC_TM_ERR, c"tag matching error"),
            (
                IBV_WC_TM_RNDV_INCOMPLETE,
                c"tag matching rendezvous incomplete",
            ),
        ],
        value,
    )
}

/// Codes of rates, with the multiple of 2.5 Gbit/s and the rate in Mbit/s (IBTA, `StaticRate`).
const RATES: [(c_int, c_int, c_int); 23] = [
    (2, 1, 2_500),
    (5, 2, 5_000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
    (10, 48, 120_000),
    (11, 6, 14_062),
    (12, 22, 56_250),
    (13, 45, 112_500),
    (14, 67, 168_750),
    (15, 10, 25_781),
    (16, 41, 103_125),
    (17, 82, 206_250),
    (18, 123, 309_375),
    (19, 11, 28_125),
    (20, 20, 50_000),
    (21, 160, 400_000),
    (22, 240, 600_000),
    (23, 320, 800_000),
    (24, 480, 1_200_000),
];

/// `ibv_rate_to_mult(3)`: returns -1 for unknown rates.
pub(crate) extern "C" fn ibv_rate_to_mult(rate: ibv_rate) -> c_int {
    // Rates that are not a multiple use the nearest multiple, so some can only be distinguished by
    // their rate in Mbit/s.
    let known = RATES.iter().find(|(code, ..)| *code == rate as c_int);
    known.map_or(-1, |(_, multiple, _)| *multiple)
}

/// `mult_to_ibv_rate(3)`: returns the maximum rate for unknown multiples.
pub(crate) extern "C" fn mult_to_ibv_rate(multiple: c_int) -> ibv_rate {
    let known = RATES.iter().find(|(_, m, _)| *m == multiple);
    known.map_or(IBV_RATE_MAX, |(code, ..)| *code as ibv_rate)
}

/// `ibv_rate_to_mbps(3)`: returns -1 for unknown rates.
pub(crate) extern "C" fn ibv_rate_to_mbps(rate: ibv_rate) -> c_int {
    let known = RATES.iter().find(|(code, ..)| *code == rate as c_int);
    known.map_or(-1, |(.., mbps)| *mbps)
}

/// `mbps_to_ibv_rate(3)`: returns the maximum rate for unknown rates.
pub(crate) extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> ibv_rate {
    let known = RATES.iter().find(|(.., m)| *m == mbps);
    known.map_or(IBV_RATE_MAX, |(code, ..)| *code as ibv_rate)
}
