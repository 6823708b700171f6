//! Querying addresses for their SRP ports over queue pair 1.

use std::net::IpAddr;
use std::time::Instant;

use riser_block::oneshot::Sender;
use riser_memory::{MemSlice, Memory};
use riser_transport::verbs::{
    Access, AhAttr, CqId, Gid, Mr, Notify, PdId, PollContext, Provider, QKey, QpCap, QpId,
    QpInitAttr, QpType, RecvWr, SendFlags, SendOp, SendWr, Sge, UdDest, VerbsError, WrId,
    make_gsi_ready,
};
use riser_transport::wire::dm::MAD_LEN;

use crate::engine::rdma::Device;
use crate::srp::discovery::{Discovery, DiscoveryError, FoundPort};

/// Maximum number of receives, outstanding sends, and concurrent searches. Other searches are
/// queued.
const DEPTH: usize = 16;
/// Length of the route header before a received datagram.
const GRH: usize = 40;
const RECV_LEN: usize = GRH + MAD_LEN;
/// Queue pair 1, for management datagrams.
const GSI: u32 = 1;

/// Result of a search for target ports.
pub(in crate::engine) type SearchResult = Result<Vec<FoundPort>, DiscoveryError>;

/// Queue pair 1, open while searches are in progress.
struct Agent {
    pd: PdId,
    cq: CqId,
    qp: QpId,
    mr: Mr,
    memory: MemSlice,
    /// Next slot for a query.
    turn: usize,
    /// Number of sends whose completions were not polled yet. This bounds sends by the completion
    /// queue, because the send queue may have room earlier.
    sends: usize,
    searches: Vec<Search>,
}

struct Search {
    gid: Gid,
    machine: Discovery,
    reply: Option<Sender<SearchResult>>,
}

impl Agent {
    fn new<P: Provider>(provider: &mut P) -> Result<Self, VerbsError> {
        let os = |e: std::io::Error| VerbsError::Os(e.raw_os_error().unwrap_or(0));
        let memory = Memory::new(DEPTH * (RECV_LEN + MAD_LEN))
            .map_err(os)?
            .whole();
        let pd = provider.alloc_pd()?;
        let made = (|| {
            let mr = provider.reg_mr(pd, &memory, Access::LOCAL_WRITE)?;
            // Room for all sends and receives, so that the queue cannot overflow.
            let cq = provider.create_cq(2 * DEPTH as u32)?;
            let depth = DEPTH as u32;
            let qp = provider.create_qp(&QpInitAttr {
                sq_sig_all: true,
                ..QpInitAttr::new(pd, cq, QpType::Gsi, QpCap::new(depth, depth))
            });
            match qp {
                Ok(qp) => Ok((mr, cq, qp)),
                Err(e) => {
                    let _ = provider.destroy_cq(cq);
                    let _ = provider.dereg_mr(mr.id);
                    Err(e)
                }
            }
        })();
        let (mr, cq, qp) = match made {
            Ok(made) => made,
            Err(e) => {
                let _ = provider.dealloc_pd(pd);
                return Err(e);
            }
        };
        let mut agent = Self {
            pd,
            cq,
            qp,
            mr,
            memory,
            turn: 0,
            sends: 0,
            searches: Vec::new(),
        };
        if let Err(e) = agent.ready(provider) {
            agent.release(provider);
            return Err(e);
        }
        Ok(agent)
    }

    fn ready<P: Provider>(&mut self, provider: &mut P) -> Result<(), VerbsError> {
        make_gsi_ready(provider, self.qp)?;
        for slot in 0..DEPTH {
            self.post_recv(provider, slot);
        }
        Ok(())
    }

    fn release<P: Provider>(&self, provider: &mut P) {
        let _ = provider.destroy_qp(self.qp);
        let _ = provider.destroy_cq(self.cq);
        let _ = provider.dereg_mr(self.mr.id);
        let _ = provider.dealloc_pd(self.pd);
    }

    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr + at as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }

    fn post_recv<P: Provider>(&self, provider: &mut P, slot: usize) {
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &[self.sge(slot * RECV_LEN, RECV_LEN)],
        };
        // Fewer receives only make a lost response more likely, and queries are repeated.
        let _ = provider.post_recv(self.qp, &[wr]);
    }

    /// Processes received datagrams, sends pending queries, and reports results. Returns whether
    /// there was anything to do.
    fn run_once<P: Provider>(&mut self, provider: &mut P, now: Instant) -> bool {
        let mut completions = Vec::new();
        let direct = PollContext::Direct { budget: DEPTH };
        let _ = direct.poll(provider, self.cq, &mut completions);
        let mut worked = !completions.is_empty();
        for completion in &completions {
            if !completion.opcode.is_recv() {
                self.sends -= 1;
                continue;
            }
            let slot = completion.wr_id.0 as usize;
            let len = (completion.byte_len as usize).clamp(GRH, RECV_LEN);
            if completion.status.is_ok() && completion.src_qp == GSI {
                let mut bytes = [0; RECV_LEN];
                self.memory.read(slot * RECV_LEN, &mut bytes);
                let from = source(&bytes[..GRH]);
                for search in self.searches.iter_mut().filter(|s| s.gid == from) {
                    search.machine.handle_mad(&bytes[GRH..len]);
                }
            }
            self.post_recv(provider, slot);
        }
        for at in 0..self.searches.len().min(DEPTH) {
            if self.sends == DEPTH {
                break;
            }
            if let Some(mad) = self.searches[at].machine.poll_query(now) {
                worked = true;
                self.send_query(provider, self.searches[at].gid, &mad);
            }
        }
        self.searches.retain_mut(|search| {
            let Some(found) = search.machine.poll_result() else {
                return true;
            };
            // Another search may start.
            worked = true;
            if let Some(reply) = search.reply.take() {
                reply.send(found);
            }
            false
        });
        worked
    }

    fn send_query<P: Provider>(&mut self, provider: &mut P, dgid: Gid, mad: &[u8; MAD_LEN]) {
        let at = DEPTH * RECV_LEN + self.turn % DEPTH * MAD_LEN;
        self.turn += 1;
        self.memory.write(at, mad);
        let attr = AhAttr::new(dgid);
        // A query that cannot be sent now is repeated later.
        let Ok(ah) = provider.create_ah(self.pd, attr) else {
            return;
        };
        let wr = SendWr {
            wr_id: WrId(0),
            op: SendOp::Send,
            sges: &[self.sge(at, MAD_LEN)],
            inline: None,
            remote_srqn: None,
            flags: SendFlags::SIGNALED,
            ud: Some(UdDest {
                ah,
                qpn: GSI,
                qkey: QKey::GSI,
            }),
        };
        if provider.post_send(self.qp, &[wr]).is_ok() {
            self.sends += 1;
        }
        let _ = provider.destroy_ah(ah);
    }
}

/// Returns the sender of a datagram: the source address of the IPv6 header, or of the IPv4 header
/// in the last 20 bytes.
fn source(grh: &[u8]) -> Gid {
    if grh[0] >> 4 == 6 {
        return Gid(grh[8..24].try_into().expect("sixteen bytes"));
    }
    let v4: [u8; 4] = grh[32..36].try_into().expect("four bytes");
    Gid::from(IpAddr::from(v4))
}

/// Searches for target ports. Queue pair 1 is only open during searches.
#[derive(Default)]
pub(super) struct PortSearches {
    agent: Option<Agent>,
}

impl PortSearches {
    /// Starts a search at an address. `transaction` is the number of the first query.
    pub(super) fn start<P: Provider>(
        &mut self,
        device: Option<&mut Device<P>>,
        ip: IpAddr,
        transaction: u64,
        reply: Sender<SearchResult>,
    ) {
        let agent = match self.agent.take() {
            Some(agent) => Ok(agent),
            None => match device {
                Some(device) => Agent::new(&mut device.provider),
                None => Err(VerbsError::InvalidState("the engine has no RDMA device")),
            },
        };
        let Ok(mut agent) = agent else {
            reply.send(Err(DiscoveryError::Unsupported));
            return;
        };
        agent.searches.push(Search {
            gid: Gid::from(ip),
            machine: Discovery::new(transaction),
            reply: Some(reply),
        });
        self.agent = Some(agent);
    }

    /// Advances the current searches; returns whether there was anything to do.
    pub(super) fn run_once<P: Provider>(
        &mut self,
        device: Option<&mut Device<P>>,
        now: Instant,
    ) -> bool {
        let (Some(agent), Some(device)) = (&mut self.agent, device) else {
            return false;
        };
        let worked = agent.run_once(&mut device.provider, now);
        if agent.searches.is_empty()
            && let Some(agent) = self.agent.take()
        {
            agent.release(&mut device.provider);
        }
        worked
    }

    /// Returns the time for repeating a query.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let searches = &self.agent.as_ref()?.searches;
        searches.iter().filter_map(|s| s.machine.deadline()).min()
    }

    /// Arms queue pair 1; returns whether completions are already available.
    pub(super) fn arm<P: Provider>(&self, device: Option<&mut Device<P>>) -> bool {
        let (Some(agent), Some(device)) = (&self.agent, device) else {
            return false;
        };
        let armed = device.provider.req_notify_cq(agent.cq, Notify::Next);
        armed.unwrap_or(false)
    }
}
