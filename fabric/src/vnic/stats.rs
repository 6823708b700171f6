//! Port statistics: counter groups for both directions, and error counters.

use super::frame::{FCS, Frame};
use super::wire::attr::{
    ErrorCounters, GroupCounters, PerVeswPortInfo, SummaryCounters, VeswPortInfo,
};
use zerocopy::FromZeros;

/// Reason for dropping a frame from the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TxDrop {
    /// The port is not forwarding.
    #[error("port is not forwarding")]
    DropState,
    /// The port may not use the frame's source address.
    #[error("source address of the frame is not permitted")]
    SmacFilter,
    /// The destination address is unknown and there is no default port.
    #[error("unknown destination address of the frame")]
    DlidZero,
    /// The frame is malformed or too long for its priority, or its destination is this port.
    #[error("invalid frame")]
    Logic,
}

/// Reason for dropping a packet from the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RxDrop {
    /// The packet belongs to another virtual switch.
    #[error("packet of another virtual switch")]
    BadVeswId,
    /// The frame is shorter than the Ethernet minimum.
    #[error("frame is too short")]
    Runt,
    /// The frame is longer than the MTU.
    #[error("frame exceeds the MTU")]
    Oversize,
    /// The interface is down.
    #[error("interface is down")]
    EthDown,
    /// The port is not forwarding.
    #[error("port is not forwarding")]
    DropState,
    /// The headers are invalid, or a fragment is missing.
    #[error("invalid packet")]
    Logic,
}

/// Counters of one direction, by type and length.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    packets: u64,
    bytes: u64,
    unicast: u64,
    mcastbcast: u64,
    untagged: u64,
    vlan: u64,
    sizes: [u64; 7],
}

impl Group {
    fn count(&mut self, frame: Frame<'_>) {
        let len = frame.len() + FCS;
        self.packets += 1;
        self.bytes += len as u64;
        match frame.dest().is_multicast() {
            true => self.mcastbcast += 1,
            false => self.unicast += 1,
        }
        match frame.priority() {
            Some(_) => self.vlan += 1,
            None => self.untagged += 1,
        }
        const LONGEST: [usize; 6] = [64, 127, 255, 511, 1023, 1518];
        let class = LONGEST.iter().position(|longest| len <= *longest);
        self.sizes[class.unwrap_or(LONGEST.len())] += 1;
    }

    fn counters(&self) -> GroupCounters {
        GroupCounters {
            unicast: self.unicast.into(),
            mcastbcast: self.mcastbcast.into(),
            untagged: self.untagged.into(),
            vlan: self.vlan.into(),
            sizes: self.sizes.map(Into::into),
        }
    }
}

/// Statistics of a port.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    tx: Group,
    rx: Group,
    tx_drop_state: u64,
    tx_smac_filt: u64,
    tx_dlid_zero: u64,
    tx_logic: u64,
    rx_bad_veswid: u64,
    rx_runt: u64,
    rx_oversize: u64,
    rx_eth_down: u64,
    rx_drop_state: u64,
    rx_logic: u64,
}

impl Stats {
    /// Counts a transmitted frame or the reason for dropping it.
    pub(super) fn count_tx(&mut self, frame: Result<Frame<'_>, TxDrop>) {
        match frame {
            Ok(frame) => self.tx.count(frame),
            Err(TxDrop::DropState) => self.tx_drop_state += 1,
            Err(TxDrop::SmacFilter) => self.tx_smac_filt += 1,
            Err(TxDrop::DlidZero) => self.tx_dlid_zero += 1,
            Err(TxDrop::Logic) => self.tx_logic += 1,
        }
    }

    /// Counts a received frame or the reason for dropping it.
    pub(super) fn count_rx(&mut self, frame: Result<Frame<'_>, RxDrop>) {
        match frame {
            Ok(frame) => self.rx.count(frame),
            Err(RxDrop::BadVeswId) => self.rx_bad_veswid += 1,
            Err(RxDrop::Runt) => self.rx_runt += 1,
            Err(RxDrop::Oversize) => self.rx_oversize += 1,
            Err(RxDrop::EthDown) => self.rx_eth_down += 1,
            Err(RxDrop::DropState) => self.rx_drop_state += 1,
            Err(RxDrop::Logic) => self.rx_logic += 1,
        }
    }

    /// Returns the number of transmitted frames.
    #[must_use]
    pub fn tx_packets(&self) -> u64 {
        self.tx.packets
    }

    /// Returns the number of received frames.
    #[must_use]
    pub fn rx_packets(&self) -> u64 {
        self.rx.packets
    }

    /// Returns the number of dropped frames from the interface.
    #[must_use]
    pub fn tx_errors(&self) -> u64 {
        self.tx_drop_state + self.tx_smac_filt + self.tx_dlid_zero + self.tx_logic
    }

    /// Returns the number of dropped packets from the fabric.
    #[must_use]
    pub fn rx_errors(&self) -> u64 {
        self.rx_bad_veswid
            + self.rx_runt
            + self.rx_oversize
            + self.rx_eth_down
            + self.rx_drop_state
            + self.rx_logic
    }

    /// Returns the summary counters for the manager.
    #[must_use]
    pub fn summary(&self, vport: u8, info: &VeswPortInfo) -> SummaryCounters {
        let PerVeswPortInfo { port_num, .. } = info.vport;
        SummaryCounters {
            vp_instance: u16::from(vport).into(),
            vesw_id: info.vesw.vesw_id,
            vesw_port_num: port_num,
            tx_errors: self.tx_errors().into(),
            rx_errors: self.rx_errors().into(),
            tx_packets: self.tx.packets.into(),
            rx_packets: self.rx.packets.into(),
            tx_bytes: self.tx.bytes.into(),
            rx_bytes: self.rx.bytes.into(),
            tx: self.tx.counters(),
            rx: self.rx.counters(),
            reserved: [0.into(); 16],
        }
    }

    /// Returns the error counters for the manager.
    #[must_use]
    pub fn errors(&self, vport: u8, info: &VeswPortInfo) -> ErrorCounters {
        ErrorCounters {
            vp_instance: u16::from(vport).into(),
            vesw_id: info.vesw.vesw_id,
            vesw_port_num: info.vport.port_num,
            tx_errors: self.tx_errors().into(),
            rx_errors: self.rx_errors().into(),
            tx_smac_filt: self.tx_smac_filt.into(),
            tx_dlid_zero: self.tx_dlid_zero.into(),
            tx_logic: self.tx_logic.into(),
            tx_drop_state: self.tx_drop_state.into(),
            rx_bad_veswid: self.rx_bad_veswid.into(),
            rx_runt: self.rx_runt.into(),
            rx_oversize: self.rx_oversize.into(),
            rx_eth_down: self.rx_eth_down.into(),
            rx_drop_state: self.rx_drop_state.into(),
            rx_logic: self.rx_logic.into(),
            ..FromZeros::new_zeroed()
        }
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::big_endian::U64;

    use super::*;

    #[test]
    fn frame_counters_include_check_sequence() {
        let mut stats = Stats::default();
        for len in [
            60, 61, 123, 124, 251, 252, 507, 508, 1019, 1020, 1514, 1515, 9014,
        ] {
            let bytes = vec![0; len];
            stats.count_tx(Ok(Frame::new(&bytes).unwrap()));
        }
        let mut tagged = vec![0xff; 60];
        tagged[12..16].copy_from_slice(&[0x81, 0, 0, 1]);
        stats.count_rx(Ok(Frame::new(&tagged).unwrap()));
        let all = [
            RxDrop::BadVeswId,
            RxDrop::Runt,
            RxDrop::Oversize,
            RxDrop::EthDown,
            RxDrop::DropState,
            RxDrop::Logic,
        ];
        for drop in all {
            stats.count_rx(Err(drop));
        }
        let mut info = VeswPortInfo::power_on();
        info.vesw.vesw_id = 7.into();
        info.vport.port_num = 9.into();
        let summary = stats.summary(3, &info);
        let sizes = summary.tx.sizes.map(U64::get);
        assert_eq!(sizes, [1, 2, 2, 2, 2, 2, 2]);
        assert_eq!(summary.tx_packets.get(), 13);
        assert_eq!((summary.vp_instance.get(), summary.vesw_id.get()), (3, 7));
        assert_eq!((summary.rx.mcastbcast.get(), summary.rx.vlan.get()), (1, 1));
        assert_eq!(summary.rx_bytes.get(), 64);
        assert_eq!(summary.rx_errors.get(), 6);
        let errors = stats.errors(3, &info);
        for count in [
            errors.rx_bad_veswid,
            errors.rx_runt,
            errors.rx_oversize,
            errors.rx_eth_down,
            errors.rx_drop_state,
            errors.rx_logic,
        ] {
            assert_eq!(count.get(), 1);
        }
        assert_eq!(errors.vesw_port_num.get(), 9);
    }
}
