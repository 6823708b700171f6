//! Counters with their Linux names (`/sys/class/infiniband/*/ports/*/hw_counters`, `rdma
//! statistic`).

use super::{Device, QpCounters};
use crate::rc::RcCounters;

/// Name and value of a counter.
pub type HwCounter = (&'static str, u64);

/// Returns the counters of reliable connections, using the names from `rdma_rxe` and `mlx5`. The
/// names refer to the requester (`req`, `rcvd` NAKs), the responder (`resp`, `send` NAKs), and for
/// congestion to the notification point (`np`) and the reaction point (`rp`).
fn of_rc(rc: &RcCounters) -> [HwCounter; 14] {
    [
        ("duplicate_request", rc.duplicates),
        ("out_of_seq_request", rc.out_of_order),
        ("rcvd_seq_err", rc.rx_nak_sequence),
        ("rcvd_rnr_err", rc.rx_rnr_naks),
        ("send_rnr_err", rc.tx_rnr_naks),
        ("local_ack_timeout_err", rc.timeouts),
        ("implied_nak_seq_err", rc.implied_naks),
        ("req_remote_invalid_request", rc.rx_nak_invalid),
        ("req_remote_access_errors", rc.rx_nak_access),
        ("resp_remote_access_errors", rc.tx_nak_access),
        ("np_ecn_marked_roce_packets", rc.rx_marked),
        ("np_cnp_sent", rc.tx_cnps),
        ("rp_cnp_handled", rc.rx_cnps),
        ("retransmits", rc.retransmits),
    ]
}

impl QpCounters {
    /// Returns the counters of a QP, starting with the packet counters.
    pub fn hw_counters(&self) -> impl Iterator<Item = HwCounter> + use<> {
        let packets = [
            ("sent_pkts", self.rc.tx_packets + self.uc.tx_packets),
            ("rcvd_pkts", self.rc.rx_packets + self.uc.rx_packets),
        ];
        // An unreliable connection does not request missing packets.
        let mut of_rc = of_rc(&self.rc);
        of_rc[1].1 += self.uc.out_of_order;
        packets.into_iter().chain(of_rc)
    }
}

impl Device {
    /// Returns the port counters since the device was created, including closed connections.
    pub fn hw_counters(&self) -> impl Iterator<Item = HwCounter> + use<> {
        let of_port = [
            ("sent_pkts", self.counters.tx_packets),
            ("sent_bytes", self.counters.tx_bytes),
            ("rcvd_pkts", self.counters.rx_packets),
            ("rcvd_bytes", self.counters.rx_bytes),
            ("rx_icrc_encapsulated", self.counters.rx_icrc_errors),
        ];
        of_port.into_iter().chain(of_rc(&self.rc_counters()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_names_match_values() {
        let mut counters = QpCounters::default();
        counters.rc.tx_packets = 1;
        counters.uc.tx_packets = 2;
        counters.rc.out_of_order = 4;
        counters.uc.out_of_order = 8;
        counters.rc.tx_rnr_naks = 16;
        counters.rc.rx_nak_access = 32;
        let named: Vec<_> = counters.hw_counters().filter(|(_, n)| *n > 0).collect();
        let expected = [
            ("sent_pkts", 3),
            ("out_of_seq_request", 12),
            ("send_rnr_err", 16),
            ("req_remote_access_errors", 32),
        ];
        assert_eq!(named, expected);
    }
}
