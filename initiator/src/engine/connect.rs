//! Opening sessions: from an address to a login, and discovery.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use riser_block::oneshot::{Sender, oneshot};
use riser_scsi::iscsi::name::{DiscoveredTarget, IscsiName};
use riser_scsi::srp::{MultiChannelAction, PortIdParts};

use super::client::Client;
use super::driver::{
    IscsiOpen, Message, Open, Plan, Protocol, SessionGuard, SrpOpen, Transport, User,
};
use super::hostname::HostName;
use super::io::Target;
use super::iser::IserConfig;
use super::session::{Session, SessionHandle};
use super::srp::SrpConfig;
use super::status::SessionStatus;
use super::{DEFAULT_TIMEOUT, EngineError};
use crate::iscsi;
use crate::session::{Down, PING, Timing};
use crate::srp::channel::ChannelConfig;
use crate::srp::discovery::{DiscoveryError, FoundPort, plan_port};
use crate::srp::session::SessionConfig;
use crate::url::{Host, IscsiUrl, SrpUrl, TargetUrl};

impl Client {
    /// Requests the SRP ports of an address. Resolves a host name on the calling thread.
    ///
    /// # Errors
    /// [`EngineError::Discovery`] if no port responds or the device does not support the query.
    pub async fn discover(&self, url: &SrpUrl) -> Result<Vec<FoundPort>, EngineError> {
        let ip = resolve(&url.into())?.dst.ip();
        let (reply, result) = oneshot();
        let message = Message::Discover {
            ip,
            transaction: self.0.random(),
            reply,
        };
        self.0
            .mailbox
            .send(message)
            .map_err(|_| EngineError::Gone)?;
        Ok(result.await.ok_or(EngineError::Gone)??)
    }

    /// Completes the address with the identifier of the target port. If the address does not name a
    /// port, this requests the target's ports. If the target does not respond, returns the address
    /// unchanged; the login then shows whether the target accepts it without an identifier.
    ///
    /// # Errors
    /// [`EngineError::Ambiguous`] if the target has several ports; [`EngineError::Unnamed`] if the
    /// device does not support the query.
    pub async fn find_port(&self, url: &SrpUrl) -> Result<SrpUrl, EngineError> {
        let mut url = url.clone();
        if url.id_ext.is_some() || url.ioc_guid.is_some() {
            return Ok(url);
        }
        match self.discover(&url).await {
            Ok(found) => match plan_port(&found, url.port) {
                Some(port) => {
                    url.id_ext = Some(port.id_ext);
                    url.ioc_guid = Some(port.ioc_guid);
                }
                None if found.iter().any(|f| f.port() == Some(url.port)) => {
                    return Err(EngineError::Ambiguous);
                }
                None => {}
            },
            Err(EngineError::Discovery(DiscoveryError::NoResponse)) => {}
            Err(EngineError::Discovery(DiscoveryError::Unsupported)) => {
                return Err(EngineError::Unnamed);
            }
            Err(e) => return Err(e),
        }
        Ok(url)
    }

    /// Logs in to a target. Resolves a host name on the calling thread. If an SRP address does not
    /// name a target port, this requests the ports from the target; [`Session::url`] then contains
    /// the port. An address with several portals creates a session that uses all of them for its
    /// logical unit; see [`crate::paths`].
    ///
    /// # Errors
    /// [`EngineError`]. Attempts the login once, with the timeout [`Timing::login`].
    pub async fn connect(&self, url: impl Into<TargetUrl>) -> Result<Session, EngineError> {
        let patience = self.0.config.timing.login;
        match url.into() {
            TargetUrl::Srp(url) => {
                let url = self.find_port(&url).await?;
                self.login(&url, patience).await
            }
            url @ TargetUrl::Iscsi(_) => self.login(url, patience).await,
        }
    }

    /// Logs in to a target without querying its ports, with the timeout `patience`.
    ///
    /// # Errors
    /// See [`Self::connect`].
    pub async fn login(
        &self,
        url: impl Into<TargetUrl>,
        patience: Duration,
    ) -> Result<Session, EngineError> {
        let url = url.into();
        if url.is_multipath() {
            return self.login_paths(url, patience).await;
        }
        let protocol = match &url {
            TargetUrl::Srp(url) => self.plan_srp(url, patience)?,
            TargetUrl::Iscsi(url) if url.target.is_none() => return Err(EngineError::NoTarget),
            TargetUrl::Iscsi(url) => self.plan_iscsi(url, patience, 0, None)?,
        };
        let plan = Plan::One(protocol);
        self.open_session(url, plan, Arc::default()).await
    }

    /// Requests the list of targets of an iSCSI portal (SendTargets). A target in the address is
    /// ignored.
    ///
    /// # Errors
    /// See [`Self::connect`]; also if the list is invalid.
    pub async fn discover_targets(
        &self,
        url: &IscsiUrl,
    ) -> Result<Vec<DiscoveredTarget>, EngineError> {
        self.send_targets(url, None).await
    }

    /// Requests the targets of a portal, or the portals of a single target.
    pub(super) async fn send_targets(
        &self,
        url: &IscsiUrl,
        sought: Option<IscsiName>,
    ) -> Result<Vec<DiscoveredTarget>, EngineError> {
        let mut url = url.clone();
        url.target = None;
        url.portals.clear();
        let (sender, found) = oneshot();
        let mut protocol = self.plan_iscsi(&url, self.0.config.timing.login, 0, Some(sender))?;
        if let Protocol::Iscsi(open) = &mut protocol {
            open.config.sought = sought;
        }
        let url = TargetUrl::Iscsi(url);
        let status = Arc::new(SessionStatus::default());
        let _guard = self.open(&url, Plan::One(protocol), status.clone()).await?;
        match found.await {
            Some(found) => Ok(found),
            // The session was live, but closed without a list.
            None => Err(status.last_down().unwrap_or(Down::ConnectionLost).into()),
        }
    }

    /// Opens a session for a user.
    pub(super) async fn open_session(
        &self,
        url: TargetUrl,
        plan: Plan,
        status: Arc<SessionStatus>,
    ) -> Result<Session, EngineError> {
        let guard = self.open(&url, plan, status.clone()).await?;
        Ok(Session {
            handle: Arc::new(SessionHandle {
                guard,
                client: self.clone(),
                status,
                url,
            }),
            timeout: DEFAULT_TIMEOUT,
        })
    }

    async fn open(
        &self,
        url: &TargetUrl,
        plan: Plan,
        status: Arc<SessionStatus>,
    ) -> Result<SessionGuard, EngineError> {
        let target = resolve(url)?;
        let (reply, result) = oneshot();
        let open = Open {
            target,
            plan,
            status,
            user: User::Caller(reply),
        };
        self.0
            .mailbox
            .send(Message::Open(Box::new(open)))
            .map_err(|_| EngineError::Gone)?;
        Ok(result.await.ok_or(EngineError::Gone)??)
    }

    pub(super) fn plan_srp(
        &self,
        url: &SrpUrl,
        patience: Duration,
    ) -> Result<Protocol, EngineError> {
        if let Some(pkey) = url.pkey.filter(|p| !self.0.device.has_pkey(*p)) {
            return Err(EngineError::NoPartition(pkey));
        }
        let config = &self.0.config;
        let queue_size = url.queue_size.unwrap_or(config.queue_size);
        let inline_descriptors = url.cmd_sg_entries.unwrap_or(12);
        let external_descriptors = match url.allow_ext_sg {
            Some(true) => 256,
            _ => 0,
        };
        let max_immediate = match url.immediate {
            Some(false) => 0,
            _ => config.max_immediate,
        };
        // Large enough for the maximum immediate data after a command with 16 additional CDB bytes,
        // and for the largest descriptor table in a command.
        let immediate_iu = 68 + max_immediate;
        let table_iu = 84 + 16 * u32::from(inline_descriptors);
        let length = url.max_it_iu_size.unwrap_or(immediate_iu.max(table_iu));
        let channel = ChannelConfig {
            queue_size,
            max_it_iu_len: length.max(riser_scsi::srp::MIN_MAX_IU_LEN),
            inline_descriptors,
            external_descriptors,
            max_immediate,
            initiator_port: url.initiator_port(PortIdParts {
                extension: self.0.extension,
                guid: self.0.port_guid(),
            }),
            target_port: url.target_port(),
            multi_channel: MultiChannelAction::Single,
        };
        let region_segments = config.region_segments.min(self.0.device.region_segments);
        Ok(Protocol::Srp(Box::new(SrpOpen {
            config: SessionConfig {
                channels: url.channels.unwrap_or(1),
                channel,
                max_requests: config.max_requests.max(queue_size.into()),
                timing: Timing {
                    login: patience,
                    ..config.timing
                },
                ping: PING,
                max_attempts: 32,
                reconnect: true,
            },
            conn: SrpConfig {
                queue_size,
                inline_descriptors,
                external_descriptors,
                region_segments: region_segments.max(1),
            },
            pool_wide: url.register_always == Some(false),
        })))
    }

    /// Returns the seed for the initiator port of a path. Each session has a separate one, because
    /// a second login with the same initiator port would terminate the first session.
    pub(super) fn session_port(&self, path: u64) -> u64 {
        match self.0.config.port {
            // An iSCSI session identifier consists of the first 40 bits.
            Some(seed) => seed.wrapping_add(path << 24),
            None => self.0.random(),
        }
    }

    pub(super) fn plan_iscsi(
        &self,
        url: &IscsiUrl,
        patience: Duration,
        path: u64,
        found: Option<Sender<Vec<DiscoveredTarget>>>,
    ) -> Result<Protocol, EngineError> {
        let config = &self.0.config;
        let limits = iscsi::Limits {
            queue_size: config.queue_size,
            max_requests: config.max_requests,
            timing: Timing {
                login: patience,
                ..config.timing
            },
        };
        let isid = iscsi::isid(self.session_port(path));
        let segments = config.region_segments.min(self.0.device.region_segments);
        let config = iscsi::plan_session(url, isid, limits)?;
        let transport = match url.is_iser() {
            false => Transport::Tcp,
            true => Transport::Iser(IserConfig {
                queue_size: config.queue_size,
                region_segments: segments.max(1),
                discovery: url.target.is_none(),
                // If the target invalidated a key without a report to us, we would invalidate it
                // again, which fails and breaks the connection.
                remote_invalidate: self.0.device.reports_invalidation,
            }),
        };
        Ok(Protocol::Iscsi(Box::new(IscsiOpen {
            config,
            transport,
            found,
        })))
    }
}

/// Resolves the addresses of a URL's target.
pub(super) fn resolve(url: &TargetUrl) -> Result<Target, EngineError> {
    let dst = url
        .resolve()
        .map_err(|_| EngineError::NoAddress(url.host().to_string()))?;
    let src = url.src().map(|ip| SocketAddr::new(ip, 0));
    let host = match url.authority() {
        (Host::Ip(_), _) => None,
        (Host::Name(name), port) => Some(HostName::new(name, port, src, dst)),
    };
    let service_id = match url {
        TargetUrl::Srp(url) => url.service_id,
        TargetUrl::Iscsi(_) => None,
    };
    Ok(Target {
        dst,
        host,
        src,
        service_id,
    })
}
