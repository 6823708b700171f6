//! Sessions over several portals.

use std::sync::Arc;
use std::time::Duration;

use riser_scsi::lun::LunId;

use super::EngineError;
use super::client::Client;
use super::connect::resolve;
use super::driver::{CHECK_LEN, PathPlan, PathsOpen, Plan};
use super::session::Session;
use super::status::SessionStatus;
use crate::paths::PathsConfig;
use crate::session::Timing;
use crate::url::IscsiUrl;
use crate::url::{Host, MAX_PORTALS, Portal, TargetUrl};

/// Interval for checking the access states of a unit with asymmetric access, and a path that the
/// unit rejected.
const RECHECK: Duration = Duration::from_secs(5);

impl Client {
    /// Logs in to all portals of an address. The session remains usable while at least one of them
    /// works.
    pub(super) async fn login_paths(
        &self,
        url: TargetUrl,
        patience: Duration,
    ) -> Result<Session, EngineError> {
        let number = u32::from(url.lun().unwrap_or(0));
        let lun = LunId::new(number).expect("an address has no other numbers");
        let portals = self.find_portals(&url).await?;
        let mut paths: Vec<PathPlan> = Vec::new();
        for (at, portal) in (0u64..).zip(&portals) {
            let target = resolve(portal)?;
            if paths.iter().any(|p| p.target.dst == target.dst) {
                return Err(EngineError::SamePortal(target.dst));
            }
            let protocol = match portal {
                // Each path has a separate initiator port.
                TargetUrl::Srp(url) => {
                    let mut url = url.clone();
                    let own = self.session_port(at);
                    let named = url.initiator_ext.map(|first| first.wrapping_add(at));
                    url.initiator_ext = Some(named.unwrap_or(own));
                    self.plan_srp(&url, patience)?
                }
                TargetUrl::Iscsi(url) if url.target.is_none() => return Err(EngineError::NoTarget),
                TargetUrl::Iscsi(url) => self.plan_iscsi(url, patience, at, None)?,
            };
            paths.push(PathPlan {
                target,
                protocol,
                buffer: self.buffers().take_buffer(CHECK_LEN).await,
            });
        }
        let config = &self.0.config;
        let open = PathsOpen {
            config: PathsConfig {
                paths: paths.len() as u8,
                max_requests: config.max_requests,
                timing: Timing {
                    login: patience,
                    ..config.timing
                },
                recheck: RECHECK,
            },
            lun,
            recovers: config.recovers,
            was_redirected: config.was_redirected,
            paths,
        };
        let status = Arc::new(SessionStatus::default());
        let names = open.paths.iter().map(|p| p.target.dst.to_string());
        status.set_portals(names);
        let plan = Plan::Paths(Box::new(open));
        self.open_session(url, plan, status).await
    }

    /// Returns a copy of the address for each portal: either the listed portals or all available
    /// ones.
    async fn find_portals(&self, url: &TargetUrl) -> Result<Vec<TargetUrl>, EngineError> {
        let first = url.first();
        let mut portals = match url.wants_all() {
            true => first
                .resolve_all()
                .map_err(|_| EngineError::NoAddress(url.host().to_string()))?
                .into_iter()
                .map(Portal::from)
                .collect(),
            false => Vec::new(),
        };
        if let TargetUrl::Iscsi(iscsi) = &first
            && url.wants_all()
        {
            let discovered = self.query_portals(iscsi).await?;
            // A source address cannot reach portals of the other address family.
            let fits = |p: &Portal| match (&p.host, url.src()) {
                (Host::Ip(ip), Some(src)) => ip.is_ipv4() == src.is_ipv4(),
                _ => true,
            };
            for portal in discovered.into_iter().filter(fits) {
                if !portals.contains(&portal) {
                    portals.push(portal);
                }
            }
        }
        for portal in url.portals() {
            if !portals.contains(portal) {
                portals.push(portal.clone());
            }
        }
        if portals.len() > MAX_PORTALS {
            tracing::warn!(
                "using only the first {MAX_PORTALS} of {} portals",
                portals.len()
            );
            portals.truncate(MAX_PORTALS);
        }
        let mut all: Vec<_> = portals.into_iter().map(|p| first.by(p)).collect();
        if !url.wants_all() {
            all.insert(0, first);
        }
        Ok(all)
    }

    /// Requests the portals of a target (SendTargets).
    async fn query_portals(&self, url: &IscsiUrl) -> Result<Vec<Portal>, EngineError> {
        // RFC 7143 Appendix C: a target must respond to a request with its own name, and this list
        // is short.
        let found = self.send_targets(url, url.target.clone()).await?;
        let ours = found
            .into_iter()
            .filter(|t| Some(&t.name) == url.target.as_ref());
        let portal = |address: riser_scsi::iscsi::name::TargetAddress| {
            let bare = address.host.trim_start_matches('[').trim_end_matches(']');
            let host = match bare.parse() {
                Ok(ip) => Host::Ip(ip),
                Err(_) => Host::Name(address.host.clone()),
            };
            let port = address.port;
            Portal { host, port }
        };
        Ok(ours.flat_map(|t| t.addresses).map(portal).collect())
    }
}
