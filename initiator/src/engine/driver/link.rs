//! What a session runs on: its protocol's machine, and what that machine drives.
//!
//! The engine knows little of a protocol: it submits requests, asks for deadlines, carries out
//! outputs (`drain`) and closes. What the outputs are is between a machine and the file that drives
//! it: `outputs`, `links` and `completions` for SRP, `tcp` and `iser` for iSCSI, `paths` for several
//! sessions that lead to one unit.

use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_transport::verbs::{Access, CqId, Mr, PdId, Provider, VerbsError};
use slab::Slab;

use super::iser::IserLink;
use super::paths::{PathsLink, PathsOpen};
use super::tcp::TcpLink;
use super::{Running, Target};
use crate::engine::conn::{Conn, ConnConfig, DataKeys};
use crate::engine::iser::{IserConfig, MAX_PIECES};
use crate::engine::oneshot::Sender;
use crate::engine::park::Waited;
use crate::iscsi;
use crate::paths::PortTag;
use crate::request::{RequestId, RequestSpec};
use crate::session::{Down, SubmitError};
use crate::srp::session::{ChannelIndex, Session, SessionConfig};

/// The protocol of a session to make.
pub(in crate::engine) enum Protocol {
    Srp(Box<SrpOpen>),
    Tcp(Box<TcpOpen>),
    Iser(Box<IserOpen>),
    /// Several sessions of the others.
    Paths(Box<PathsOpen>),
}

impl Protocol {
    /// The same again, for a session that does not reconnect, with that time for its login.
    pub(super) fn once(&self, patience: Duration) -> Self {
        match self {
            Self::Srp(open) => {
                let SrpOpen {
                    mut config,
                    conn,
                    pool_wide,
                } = **open;
                config.reconnect = false;
                config.timing.login = patience;
                Self::Srp(Box::new(SrpOpen {
                    config,
                    conn,
                    pool_wide,
                }))
            }
            Self::Tcp(open) => Self::Tcp(Box::new(TcpOpen {
                config: iscsi_once(&open.config, patience),
                found: None,
            })),
            Self::Iser(open) => Self::Iser(Box::new(IserOpen {
                config: iscsi_once(&open.config, patience),
                conn: open.conn,
                found: None,
            })),
            Self::Paths(_) => unreachable!("paths are sessions of their own"),
        }
    }
}

fn iscsi_once(
    config: &iscsi::session::SessionConfig,
    patience: Duration,
) -> iscsi::session::SessionConfig {
    let mut config = config.clone();
    config.reconnect = false;
    config.timing.login = patience;
    config
}

pub(in crate::engine) struct SrpOpen {
    pub(in crate::engine) config: SessionConfig,
    pub(in crate::engine) conn: ConnConfig,
    /// Whether commands use the pool's own remote key.
    pub(in crate::engine) pool_wide: bool,
}

pub(in crate::engine) struct TcpOpen {
    pub(in crate::engine) config: iscsi::session::SessionConfig,
    /// Told of the targets that a discovery session finds.
    pub(in crate::engine) found: Option<Sender<Vec<riser_scsi::iscsi::name::Found>>>,
}

pub(in crate::engine) struct IserOpen {
    pub(in crate::engine) config: iscsi::session::SessionConfig,
    pub(in crate::engine) conn: IserConfig,
    /// As of [`TcpOpen`].
    pub(in crate::engine) found: Option<Sender<Vec<riser_scsi::iscsi::name::Found>>>,
}

/// What a session on RDMA has of the device.
pub(super) struct Rdma {
    pub(super) pd: PdId,
    pub(super) cq: CqId,
    /// The registration of the pool of data buffers.
    pub(super) pool: Mr,
}

impl Rdma {
    /// Makes a protection domain, a completion queue and the pool's registration.
    pub(super) fn new<P: Provider>(
        provider: &mut P,
        pool: &MemSlice,
        completions: u32,
        is_remote: bool,
    ) -> Result<Self, VerbsError> {
        let pd = provider.alloc_pd()?;
        // One spare, so that a correct device cannot fill the queue.
        let cq = match provider.create_cq(completions + 1) {
            Ok(cq) => cq,
            Err(e) => {
                let _ = provider.dealloc_pd(pd);
                return Err(e);
            }
        };
        let access = match is_remote {
            true => Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE,
            false => Access::LOCAL_WRITE,
        };
        match provider.reg_mr(pd, pool, access) {
            Ok(pool) => Ok(Self { pd, cq, pool }),
            Err(e) => {
                let _ = provider.destroy_cq(cq);
                let _ = provider.dealloc_pd(pd);
                Err(e)
            }
        }
    }

    fn release<P: Provider>(&self, provider: &mut P) {
        let _ = provider.dereg_mr(self.pool.id);
        let _ = provider.destroy_cq(self.cq);
        let _ = provider.dealloc_pd(self.pd);
    }
}

/// A session of SRP.
pub(super) struct SrpLink {
    pub(super) machine: Session,
    pub(super) target: Target,
    pub(super) conn_config: ConnConfig,
    pub(super) rdma: Rdma,
    pub(super) keys: DataKeys,
    pub(super) conns: Vec<Option<Conn>>,
    /// The receive whose information unit is being handled and whether it may be posted again.
    pub(super) receiving: Option<(ChannelIndex, u16)>,
}

impl SrpLink {
    pub(super) fn new<P: Provider>(
        provider: &mut P,
        pool: &MemSlice,
        target: Target,
        open: &SrpOpen,
        now: Instant,
    ) -> Result<Self, VerbsError> {
        let completions = open.conn.completions() * u32::from(open.config.channels);
        let rdma = Rdma::new(provider, pool, completions, open.pool_wide)?;
        let pool = rdma.pool;
        let pool_wide = open.pool_wide;
        Ok(Self {
            machine: Session::new(open.config, now),
            target,
            conn_config: open.conn,
            rdma,
            keys: DataKeys { pool, pool_wide },
            conns: (0..open.config.channels).map(|_| None).collect(),
            receiving: None,
        })
    }
}

/// See the module's documentation.
pub(super) enum Link {
    Srp(Box<SrpLink>),
    Tcp(Box<TcpLink>),
    Iser(Box<IserLink>),
    Paths(Box<PathsLink>),
}

impl Link {
    pub(super) fn submit(
        &mut self,
        spec: RequestSpec,
        now: Instant,
    ) -> Result<RequestId, SubmitError> {
        match self {
            Self::Srp(link) => link.machine.submit(spec, now),
            Self::Tcp(link) => link.machine.submit(spec, now),
            Self::Iser(link) => link.machine.submit(spec, now),
            Self::Paths(link) => link.machine.submit(spec),
        }
    }

    pub(super) fn close(&mut self, now: Instant) {
        match self {
            Self::Srp(link) => link.machine.close(now),
            Self::Tcp(link) => link.machine.close(now),
            Self::Iser(link) => link.machine.close(now),
            Self::Paths(link) => link.machine.close(),
        }
    }

    /// See [`Session::set_guarded`]. Paths see to it themselves.
    pub(super) fn set_guarded(&mut self, is_guarded: bool) {
        match self {
            Self::Srp(link) => link.machine.set_guarded(is_guarded),
            Self::Tcp(link) => link.machine.set_guarded(is_guarded),
            Self::Iser(link) => link.machine.set_guarded(is_guarded),
            Self::Paths(_) => {}
        }
    }

    /// A unit may be another one: nothing but probes is started before [`Self::release`].
    pub(super) fn hold(&mut self) {
        match self {
            Self::Srp(link) => link.machine.hold(),
            Self::Tcp(link) => link.machine.hold(),
            Self::Iser(link) => link.machine.hold(),
            Self::Paths(_) => {}
        }
    }

    /// The units are the same as before. `ends_old` is for SRP; see
    /// [`Session::release`](crate::srp::session::Session::release). iSCSI's targets have to (RFC 7143
    /// clause 6.3.5).
    pub(super) fn release(&mut self, ends_old: bool, now: Instant) {
        match self {
            Self::Srp(link) => link.machine.release(ends_old, now),
            Self::Tcp(link) => link.machine.release(now),
            Self::Iser(link) => link.machine.release(now),
            Self::Paths(_) => {}
        }
    }

    /// See [`Session::recover`](crate::srp::session::Session::recover). Targets of iSCSI end the session of
    /// before, and paths have rules of their own.
    pub(super) fn recover(&mut self, now: Instant) {
        if let Self::Srp(link) = self {
            link.machine.recover(now);
        }
    }

    /// The units are not the same as before: ends the session, or its connection.
    pub(super) fn leave(&mut self, why: Down, last: bool, now: Instant) {
        match self {
            Self::Srp(link) => link.machine.leave(why, last, now),
            Self::Tcp(link) => link.machine.leave(why, last, now),
            Self::Iser(link) => link.machine.leave(why, last, now),
            Self::Paths(_) => {}
        }
    }

    /// When the target was last heard of.
    pub(super) fn last_heard(&self) -> Option<Instant> {
        match self {
            Self::Srp(link) => Some(link.machine.last_heard()),
            Self::Tcp(link) => Some(link.machine.last_heard()),
            Self::Iser(link) => Some(link.machine.last_heard()),
            Self::Paths(_) => None,
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match self {
            Self::Srp(link) => link.machine.next_deadline(),
            Self::Tcp(link) => link.machine.next_deadline(),
            Self::Iser(link) => link.machine.next_deadline(),
            Self::Paths(link) => link.machine.next_deadline(),
        }
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        match self {
            Self::Srp(link) => link.machine.handle_timeout(now),
            Self::Tcp(link) => link.machine.handle_timeout(now),
            Self::Iser(link) => link.machine.handle_timeout(now),
            Self::Paths(link) => link.machine.handle_timeout(now),
        }
    }

    /// Whether a command's memory may have that many pieces. A command of iSER has one key for all
    /// of it, and a number that is lost if it cannot be sent.
    pub(super) fn takes(&self, pieces: usize) -> bool {
        match self {
            // Whichever path it takes will see.
            Self::Srp(_) | Self::Tcp(_) | Self::Paths(_) => true,
            Self::Iser(link) => pieces <= MAX_PIECES.min(link.config.region_segments as usize),
        }
    }

    /// Where the session's target is.
    pub(super) fn target(&self) -> &Target {
        match self {
            Self::Srp(link) => &link.target,
            Self::Tcp(link) => &link.target,
            Self::Iser(link) => &link.target,
            Self::Paths(link) => link.target(),
        }
    }

    /// What a session that is logged in is with.
    pub(super) fn port(&self) -> Option<PortTag> {
        match self {
            Self::Srp(link) => link.machine.target_port().map(PortTag::Port),
            Self::Tcp(link) => link.machine.portal_group().map(PortTag::Group),
            Self::Iser(link) => link.machine.portal_group().map(PortTag::Group),
            Self::Paths(_) => None,
        }
    }

    /// Channels that are closed when what is on its way has ended, and how long that may take.
    pub(super) fn closings(&self) -> impl Iterator<Item = (u8, Instant)> {
        let (conns, iser) = match self {
            Self::Srp(link) => (&link.conns[..], None),
            Self::Iser(link) => (&[][..], link.conn.as_ref()),
            Self::Tcp(_) | Self::Paths(_) => (&[][..], None),
        };
        let channels = conns.iter().enumerate().filter_map(|(channel, conn)| {
            let until = conn.as_ref()?.closing_until?;
            Some((channel as u8, until))
        });
        let connection = iser.and_then(|conn| Some((0, conn.closing_until?)));
        channels.chain(connection)
    }

    /// The completion queue, of sessions on RDMA.
    pub(super) fn cq(&self) -> Option<CqId> {
        match self {
            Self::Srp(link) => Some(link.rdma.cq),
            Self::Iser(link) => Some(link.rdma.cq),
            Self::Tcp(_) | Self::Paths(_) => None,
        }
    }

    /// The descriptor to wait for, of sessions on TCP.
    pub(super) fn waited(&self) -> Option<Waited> {
        match self {
            Self::Srp(_) | Self::Iser(_) | Self::Paths(_) => None,
            Self::Tcp(link) => link.waited(),
        }
    }

    /// Gives back what the device holds for a session that is over.
    pub(super) fn give_back<P: Provider>(self, provider: &mut P) {
        match self {
            Self::Srp(link) => {
                debug_assert!(link.conns.iter().all(Option::is_none));
                link.rdma.release(provider);
            }
            Self::Iser(link) => {
                debug_assert!(link.conn.is_none());
                link.rdma.release(provider);
            }
            Self::Tcp(_) | Self::Paths(_) => {}
        }
    }
}

/// The session of that index, which is one of SRP: its queue pairs and identifiers said so.
pub(super) fn srp(sessions: &mut Slab<Running>, index: usize) -> &mut SrpLink {
    match &mut sessions[index].link {
        Link::Srp(link) => link,
        Link::Tcp(_) | Link::Iser(_) | Link::Paths(_) => unreachable!("a session of SRP"),
    }
}

/// The session of that index, which is one of iSER, as [`srp`].
pub(super) fn iser(sessions: &mut Slab<Running>, index: usize) -> &mut IserLink {
    match &mut sessions[index].link {
        Link::Iser(link) => link,
        Link::Srp(_) | Link::Tcp(_) | Link::Paths(_) => unreachable!("a session of iSER"),
    }
}
