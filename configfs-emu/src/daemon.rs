//! Connects to a running `riserd` via its admin socket.

use std::collections::BTreeMap;
use std::path::PathBuf;

use hyper::Method;
use riser_admin_api::client::{self, ApiRequest, ClientError};
use riser_admin_api::live::Live;
use riser_admin_api::view::{Changes, SessionView};
use rustix::io::Errno;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::engine::{ApplyError, Daemon};
use crate::host::LiveSource;
use crate::world::Session;

/// A daemon connected via its admin socket. We use this socket to read and replace the
/// configuration, but it's up to the daemon where to store it.
#[derive(Debug)]
pub struct Riserd {
    socket: PathBuf,
    /// Revision of the configuration we last read.
    revision: Option<String>,
}

impl Riserd {
    /// Creates a client for the daemon at this socket.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            revision: None,
        }
    }
}

impl From<ClientError> for ApplyError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Mistake(why) => Self::Refused { why, errno: None },
            ClientError::Refused { why, errno } => Self::Refused {
                why,
                errno: errno.map(Errno::from_raw_os_error),
            },
            ClientError::Outdated(_) => Self::Outdated,
            other => Self::Unreachable(other.to_string()),
        }
    }
}

impl Daemon for Riserd {
    fn document(&mut self) -> Result<Value, ApplyError> {
        let question = ApiRequest {
            accept: Some("application/json"),
            ..ApiRequest::new(Method::GET, "/v1/config")
        };
        let said = client::fetch(&self.socket, question)?;
        let document = serde_json::from_slice(&said.body);
        let document = document.map_err(|e| ApplyError::Unreachable(e.to_string()))?;
        // This should only be set if the document was valid, because the next change will replace
        // this revision.
        self.revision = said.revision;
        Ok(document)
    }

    fn apply(&mut self, document: &Value) -> Result<(), ApplyError> {
        let question = ApiRequest {
            // The daemon will reject the request if its revision is different, so that we never
            // overwrite a change by another user without seeing it.
            replaces: self.revision.clone(),
            ..ApiRequest::new(Method::PUT, "/v1/config").with(document.to_string())
        };
        let _: Changes = client::call(&self.socket, question)?;
        Ok(())
    }
}

/// Used to query the daemon's current state via its admin socket. If there is no response, an empty
/// state is returned.
#[derive(Debug)]
pub struct AdminSocket(pub PathBuf);

impl AdminSocket {
    fn query<T: DeserializeOwned + Default>(&self, path: &'static str) -> T {
        client::call(&self.0, ApiRequest::new(Method::GET, path)).unwrap_or_else(|error| {
            tracing::warn!(%error, path, "riserd does not respond");
            T::default()
        })
    }
}

impl LiveSource for AdminSocket {
    fn sessions(&self) -> Vec<Session> {
        gather(self.query("/v1/sessions"))
    }

    fn live(&self) -> Live {
        self.query("/v1/live")
    }
}

/// Groups connections by session.
fn gather(views: Vec<SessionView>) -> Vec<Session> {
    let mut sessions: BTreeMap<(String, String, u64), Session> = BTreeMap::new();
    for view in views {
        // A connection doesn't belong to a session before it has logged in.
        let Some(nexus) = view.nexus else {
            continue;
        };
        let (initiator, isid) = view
            .initiator
            .split_once(',')
            .unwrap_or((&view.initiator, ""));
        let key = (view.target.clone(), view.initiator.clone(), nexus);
        let session = sessions.entry(key).or_insert_with(|| Session {
            target: view.target,
            initiator: initiator.to_owned(),
            isid: isid.trim_start_matches("0x").to_owned(),
            id: nexus,
            terms: view.negotiated,
            ..Session::default()
        });
        session.addresses.push(view.peer);
        // A session is live if any of its connections is live.
        session.is_live |= view.state == "live";
    }
    sessions.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(peer: &str, nexus: Option<u64>) -> SessionView {
        SessionView {
            protocol: "iscsi".to_owned(),
            target: "t".to_owned(),
            initiator: "iqn.a:b,0x00023d000001".to_owned(),
            peer: peer.to_owned(),
            nexus,
            state: "live".to_owned(),
            ..SessionView::default()
        }
    }

    #[test]
    fn connections_are_gathered_into_sessions() {
        let views = vec![
            view("10.0.0.1:1", Some(3)),
            view("10.0.0.1:2", Some(3)),
            view("10.0.0.1:3", None),
        ];
        let sessions = gather(views);
        assert_eq!(sessions.len(), 1);
        assert_eq!(sessions[0].addresses, ["10.0.0.1:1", "10.0.0.1:2"]);
        assert_eq!(
            (sessions[0].initiator.as_str(), sessions[0].id),
            ("iqn.a:b", 3)
        );
        assert_eq!(sessions[0].isid, "00023d000001");
        assert!(sessions[0].is_live);
    }
}
