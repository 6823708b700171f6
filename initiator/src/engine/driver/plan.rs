//! Parameters for opening sessions.

use std::time::Duration;

use riser_block::Buffer;
use riser_block::oneshot::Sender;
use riser_scsi::iscsi::name::DiscoveredTarget;
use riser_scsi::lun::LunId;

use crate::engine::io::Target;
use crate::engine::iser::IserConfig;
use crate::engine::srp::SrpConfig;
use crate::paths::PathsConfig;
use crate::scsi::VPD_LEN;
use crate::{iscsi, srp};

/// Length of the buffer for each query of a check, in bytes.
pub(in crate::engine) const CHECK_LEN: usize = VPD_LEN as usize;

/// Kind of session to open.
pub(in crate::engine) enum Plan {
    /// A session with a single target.
    One(Protocol),
    /// A session over several paths, each with a separate session.
    Paths(Box<PathsOpen>),
}

/// Protocol of a session with a single target.
pub(in crate::engine) enum Protocol {
    Srp(Box<SrpOpen>),
    Iscsi(Box<IscsiOpen>),
}

impl Protocol {
    /// Returns a copy for a session that does not reconnect, with this timeout for the login: paths
    /// open a new session instead.
    pub(super) fn once(&self, patience: Duration) -> Self {
        match self {
            Self::Srp(open) => Self::Srp(Box::new(open.once(patience))),
            Self::Iscsi(open) => Self::Iscsi(Box::new(open.once(patience))),
        }
    }
}

/// Parameters of an SRP session.
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

/// Parameters of an iSCSI session.
pub(in crate::engine) struct IscsiOpen {
    pub(in crate::engine) config: iscsi::session::SessionConfig,
    pub(in crate::engine) transport: Transport,
    /// Receives the targets found by a discovery session.
    pub(in crate::engine) found: Option<Sender<Vec<DiscoveredTarget>>>,
}

/// Transport of a session.
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

/// Parameters for the paths to a unit.
pub(in crate::engine) struct PathsOpen {
    pub(in crate::engine) config: PathsConfig,
    pub(in crate::engine) lun: LunId,
    /// Commands of an earlier process may be in flight; see
    /// [`Machine::recover`](crate::session::Machine::recover).
    pub(in crate::engine) recovers: bool,
    /// A login of the earlier process was redirected to another port.
    pub(in crate::engine) was_redirected: bool,
    pub(in crate::engine) paths: Vec<PathPlan>,
}

/// Parameters of a path.
pub(in crate::engine) struct PathPlan {
    pub(in crate::engine) target: Target,
    /// Protocol, including the path's initiator port.
    pub(in crate::engine) protocol: Protocol,
    /// Buffer for the unit's responses to a check, of [`CHECK_LEN`] bytes.
    pub(in crate::engine) buffer: Buffer,
}
