//! Sessions to make.

use std::time::Duration;

use riser_scsi::iscsi::name::Found;
use riser_scsi::lun::LunId;

use crate::block::Buffer;
use crate::engine::io::Target;
use crate::engine::iser::IserConfig;
use crate::engine::oneshot::Sender;
use crate::engine::srp::SrpConfig;
use crate::paths::PathsConfig;
use crate::scsi::VPD_LEN;
use crate::{iscsi, srp};

/// Length of every answer that is asked for, in bytes.
pub(in crate::engine) const CHECK_LEN: usize = VPD_LEN as usize;

/// A session to make.
pub(in crate::engine) enum Plan {
    /// A session with one target.
    One(Protocol),
    /// Over several paths, which are sessions of their own.
    Paths(Box<PathsOpen>),
}

/// The protocol of a session with one target.
pub(in crate::engine) enum Protocol {
    Srp(Box<SrpOpen>),
    Iscsi(Box<IscsiOpen>),
}

impl Protocol {
    /// The same for a session that does not reconnect, with that time for its login: paths make
    /// another one instead.
    pub(super) fn once(&self, patience: Duration) -> Self {
        match self {
            Self::Srp(open) => Self::Srp(Box::new(open.once(patience))),
            Self::Iscsi(open) => Self::Iscsi(Box::new(open.once(patience))),
        }
    }
}

/// A session of SRP to make.
pub(in crate::engine) struct SrpOpen {
    pub(in crate::engine) config: srp::session::SessionConfig,
    pub(in crate::engine) conn: SrpConfig,
    /// Commands use the pool's own remote key.
    pub(in crate::engine) pool_wide: bool,
}

impl SrpOpen {
    fn once(&self, patience: Duration) -> Self {
        let mut config = self.config;
        config.reconnect = false;
        config.timing.login = patience;
        Self {
            config,
            conn: self.conn,
            pool_wide: self.pool_wide,
        }
    }
}

/// A session of iSCSI to make.
pub(in crate::engine) struct IscsiOpen {
    pub(in crate::engine) config: iscsi::session::SessionConfig,
    pub(in crate::engine) transport: Transport,
    /// Receives the targets that a discovery session finds.
    pub(in crate::engine) found: Option<Sender<Vec<Found>>>,
}

/// The transport of a session.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) enum Transport {
    Tcp,
    Iser(IserConfig),
}

impl IscsiOpen {
    fn once(&self, patience: Duration) -> Self {
        let mut config = self.config.clone();
        config.reconnect = false;
        config.timing.login = patience;
        Self {
            config,
            transport: self.transport,
            found: None,
        }
    }
}

/// Paths to one unit, to be made.
pub(in crate::engine) struct PathsOpen {
    pub(in crate::engine) config: PathsConfig,
    pub(in crate::engine) lun: LunId,
    /// Commands of an earlier process may be on their way; see
    /// [`Machine::recover`](crate::session::Machine::recover).
    pub(in crate::engine) recovers: bool,
    pub(in crate::engine) paths: Vec<PathPlan>,
}

/// A path to make.
pub(in crate::engine) struct PathPlan {
    pub(in crate::engine) target: Target,
    /// Of its initiator port.
    pub(in crate::engine) protocol: Protocol,
    /// For the unit's answers to its check: [`CHECK_LEN`] bytes.
    pub(in crate::engine) buffer: Buffer,
}
