//! Datagram queue pair with memory slots for send and receive.

use riser_fabric::vnic::QpAddress;
use riser_memory::Memory;
use riser_transport::verbs::{
    Access, AhId, Completion, CqId, GRH_LEN, Gid, Mr, PdId, QKey, QpCap, QpId, QpInitAttr, QpType,
    RecvWr, RouteHeader, SendOp, SendWr, Sge, UdDest, Verbs, VerbsError, WrId,
    make_datagrams_ready,
};

/// Queue pair number used for multicast datagrams (IBTA 3.5.3).
pub(super) const MULTICAST_QPN: u32 = 0xff_ffff;

/// A datagram queue pair.
pub(super) struct Queue {
    qp: QpId,
    mr: Mr,
    memory: Memory,
    /// Queue pair number on the wire.
    pub(super) qpn: u32,
    qkey: QKey,
    mtu: usize,
    receives: usize,
    free: Vec<usize>,
    /// Completed receives which need to be posted again.
    taken: Vec<usize>,
}

/// Queue parameters.
pub(super) struct QueueConfig {
    /// Value used in the upper half of the work request ID.
    pub(super) number: u32,
    pub(super) qkey: u32,
    /// Max datagram size in bytes.
    pub(super) mtu: usize,
    pub(super) receives: usize,
    pub(super) sends: usize,
}

/// Bit set in the work request ID for receives.
const RECEIVE: u64 = 1 << 31;

/// Queue completion.
pub(super) enum Event {
    /// Received a datagram into this slot.
    Received { slot: usize, len: usize, qpn: u32 },
    /// A send slot is available again, or a receive failed.
    Nothing,
}

impl Queue {
    pub(super) fn open(
        nic: &mut dyn Verbs,
        pd: PdId,
        cq: CqId,
        config: &QueueConfig,
        group: Gid,
    ) -> Result<Self, VerbsError> {
        let os = |e: std::io::Error| VerbsError::Os(e.raw_os_error().unwrap_or(0));
        let slot = GRH_LEN + config.mtu;
        let memory = Memory::new(slot * (config.receives + config.sends)).map_err(os)?;
        let mr = nic.reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE)?;
        let cap = QpCap::new(config.sends as u32, config.receives as u32);
        let qp = nic.create_qp(&QpInitAttr {
            block_self_mcast: true,
            sq_sig_all: true,
            ..QpInitAttr::new(pd, cq, QpType::Ud, cap)
        })?;
        make_datagrams_ready(nic, qp, QKey(config.qkey))?;
        nic.attach_mcast(qp, group, 0)?;
        let number = u64::from(config.number) << 32;
        let mut queue = Self {
            qp,
            mr,
            memory,
            qpn: nic.qp_num(qp)?,
            qkey: QKey(config.qkey),
            mtu: config.mtu,
            receives: config.receives,
            free: (0..config.sends).collect(),
            taken: (0..config.receives).collect(),
        };
        queue.post_receives(nic, number)?;
        Ok(queue)
    }

    fn sge(&self, slot: usize, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr + (slot * (GRH_LEN + self.mtu)) as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }

    /// Posts completed receives again.
    fn post_receives(&mut self, nic: &mut dyn Verbs, number: u64) -> Result<(), VerbsError> {
        while let Some(slot) = self.taken.pop() {
            let sges = [self.sge(slot, GRH_LEN + self.mtu)];
            let wr = RecvWr {
                wr_id: WrId(number | RECEIVE | slot as u64),
                sges: &sges,
            };
            let posted = nic.post_recv(self.qp, &[wr]);
            posted.map_err(|_| VerbsError::InvalidState("cannot post a receive to the queue"))?;
        }
        Ok(())
    }

    /// Handles a completion for this queue.
    pub(super) fn handle_completion(&mut self, completion: &Completion) -> Event {
        let id = completion.wr_id.0 as u32;
        let slot = (u64::from(id) & !RECEIVE) as usize;
        if u64::from(id) & RECEIVE == 0 {
            self.free.push(slot);
            return Event::Nothing;
        }
        self.taken.push(slot);
        let len = (completion.byte_len as usize).saturating_sub(GRH_LEN);
        match completion.status.is_ok() && len <= self.mtu {
            true => Event::Received {
                slot,
                len,
                qpn: completion.src_qp,
            },
            false => Event::Nothing,
        }
    }

    /// Copies the datagram from its slot and returns the source address. The slot can be reused
    /// after [`Queue::post_again`] is called.
    pub(super) fn read(
        &self,
        slot: usize,
        len: usize,
        qpn: u32,
        out: &mut Vec<u8>,
    ) -> Option<QpAddress> {
        let at = slot * (GRH_LEN + self.mtu);
        let mut grh = [0; GRH_LEN];
        self.memory.read(at, &mut grh);
        let source = RouteHeader::parse(&grh).ok()?.source;
        out.resize(len, 0);
        self.memory.read(at + GRH_LEN, out);
        Some(QpAddress {
            gid: Gid::from(source),
            qpn,
        })
    }

    /// Posts receives again after [`Queue::handle_completion`] returned them.
    pub(super) fn post_again(
        &mut self,
        nic: &mut dyn Verbs,
        number: u32,
    ) -> Result<(), VerbsError> {
        self.post_receives(nic, u64::from(number) << 32)
    }

    /// Number of datagrams which can currently be sent.
    pub(super) fn room(&self) -> usize {
        self.free.len()
    }

    /// Sends a datagram, or drops it if the queue is full.
    pub(super) fn send(
        &mut self,
        nic: &mut dyn Verbs,
        number: u32,
        (ah, qpn): (AhId, u32),
        datagram: &[u8],
    ) {
        let Some(slot) = self.free.pop() else {
            return;
        };
        let place = self.receives + slot;
        self.memory.write(place * (GRH_LEN + self.mtu), datagram);
        let sges = [self.sge(place, datagram.len())];
        let wr_id = u64::from(number) << 32 | slot as u64;
        let wr = SendWr {
            ud: Some(UdDest {
                ah,
                qpn,
                qkey: self.qkey,
            }),
            ..SendWr::new(wr_id, SendOp::Send, &sges)
        };
        if let Err(error) = nic.post_send(self.qp, &[wr]) {
            tracing::debug!(?error, "datagram not sent");
            self.free.push(slot);
        }
    }
}
