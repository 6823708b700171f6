//! A running `riserd`: its configuration file, which is written, and its admin socket, which is told.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hyper::Method;
use riser_target::control::client::{self, ClientError, Question};
use riser_target::control::state::replace;
use riser_target::control::view::{SessionView, TargetView};
use serde_json::Value;

use crate::engine::{ApplyError, Daemon};
use crate::world::Session;

/// A daemon that was started with a configuration file.
///
/// A change is written to the file, where the next start finds it, and the daemon reads the file again.
/// If it says no, the file is put back.
#[derive(Debug)]
pub struct Riserd {
    file: PathBuf,
    socket: PathBuf,
}

impl Riserd {
    /// The daemon at a socket, which was started with a file.
    #[must_use]
    pub fn new(file: PathBuf, socket: PathBuf) -> Self {
        Self { file, socket }
    }

    /// What the file says.
    ///
    /// # Errors
    /// It cannot be read, or is no YAML.
    pub fn document(&self) -> io::Result<Value> {
        let text = fs::read_to_string(&self.file)?;
        serde_saphyr::from_str(&text).map_err(io::Error::other)
    }
}

impl Daemon for Riserd {
    fn apply(&mut self, document: &Value) -> Result<(), ApplyError> {
        let io = |e: io::Error| ApplyError::Refused(format!("{}: {e}", self.file.display()));
        let before = fs::read(&self.file).map_err(io)?;
        let text = serde_json::to_vec_pretty(document).expect("it has text for keys");
        replace(&self.file, &text).map_err(io)?;
        let reloaded: Result<Vec<TargetView>, ClientError> =
            client::call(&self.socket, Question::new(Method::POST, "/v1/reload"));
        let Err(error) = reloaded else {
            return Ok(());
        };
        replace(&self.file, &before).map_err(io)?;
        Err(match error {
            ClientError::Refused(why) | ClientError::Mistake(why) => ApplyError::Refused(why),
            other => ApplyError::Unreachable(other.to_string()),
        })
    }
}

/// The sessions of the daemon at a socket; none if it does not answer.
#[must_use]
pub fn sessions(socket: &Path) -> Vec<Session> {
    let views: Result<Vec<SessionView>, ClientError> =
        client::call(socket, Question::new(Method::GET, "/v1/sessions"));
    match views {
        Ok(views) => gather(views),
        Err(error) => {
            tracing::warn!(%error, "sessions are not known");
            Vec::new()
        }
    }
}

/// Connections, gathered into their sessions.
fn gather(views: Vec<SessionView>) -> Vec<Session> {
    let mut sessions: BTreeMap<(String, String, u32), Session> = BTreeMap::new();
    for view in views {
        let Some(nexus) = view.nexus else {
            continue;
        };
        let (initiator, isid) = match view.initiator.split_once(',') {
            Some((name, isid)) => (name.to_owned(), isid.trim_start_matches("0x").to_owned()),
            None => (view.initiator.clone(), String::new()),
        };
        let key = (view.target.clone(), view.initiator.clone(), nexus);
        let session = sessions.entry(key).or_insert_with(|| Session {
            target: view.target,
            initiator,
            isid,
            id: nexus,
            terms: view.negotiated,
            ..Session::default()
        });
        session.addresses.push(view.peer);
        session.is_live |= view.state == "live";
    }
    sessions.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(peer: &str, nexus: Option<u32>) -> SessionView {
        SessionView {
            protocol: "iscsi".to_owned(),
            target: "t".to_owned(),
            initiator: "iqn.a:b,0x00023d000001".to_owned(),
            peer: peer.to_owned(),
            worker: 0,
            nexus,
            state: "live".to_owned(),
            in_flight: 0,
            luns: 1,
            memory: 0,
            negotiated: BTreeMap::new(),
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
