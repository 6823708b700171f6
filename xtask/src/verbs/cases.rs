//! Test cases, which contain the programs to run and the expected output.

use serde::Deserialize;

use crate::cases;

/// Condition used to check if a server is ready for clients.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(from = "String")]
pub(super) enum Ready {
    /// The server is listening on the TCP port of the case.
    Port,
    /// The device has opened its UDP socket. We can't observe any other system call before the
    /// server is listening.
    #[default]
    Device,
    /// The server has printed this text.
    Says(String),
}

impl From<String> for Ready {
    fn from(text: String) -> Self {
        match text.as_str() {
            "port" => Self::Port,
            "device" => Self::Device,
            _ => Self::Says(text),
        }
    }
}

/// A test case; `xtask/cases/verbs.toml` describes the fields.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Case {
    group: String,
    name: String,
    pub(super) server: Option<String>,
    #[serde(default)]
    pub(super) ready: Ready,
    #[serde(default)]
    pub(super) stop: bool,
    pub(super) client: Option<String>,
    #[serde(default = "one")]
    pub(super) clients: usize,
    #[serde(default)]
    pub(super) says: Vec<String>,
    #[serde(default)]
    pub(super) refused: bool,
    pub(super) faults: Option<String>,
    pub(super) config: Option<String>,
    pub(super) variable: Option<(String, String)>,
    #[serde(default)]
    pub(super) network: bool,
    pub(super) source: Option<String>,
    #[serde(default = "seconds")]
    pub(super) seconds: u64,
    may_lose: Option<String>,
}

fn one() -> usize {
    1
}

fn seconds() -> u64 {
    30
}

impl Case {
    pub(super) fn path(&self) -> String {
        format!("{}/{}", self.group, self.name.trim())
    }

    pub(super) fn commands(&self) -> impl Iterator<Item = &String> {
        self.server.iter().chain(&self.client)
    }

    /// Returns the programs used by this case, excluding `env` and its variables.
    pub(super) fn programs(&self) -> impl Iterator<Item = &str> {
        self.commands().filter_map(|command| {
            let mut words = command.split(' ');
            words.find(|word| *word != "env" && !word.contains('='))
        })
    }

    pub(super) fn may_lose(&self) -> bool {
        let words = self.may_lose.as_deref();
        words.is_some_and(|words| self.commands().any(|command| command.contains(words)))
    }
}

/// Returns all cases with commands, in order.
pub(super) fn all() -> Vec<Case> {
    let mut cases = cases::read::<Case>(include_str!("../../cases/verbs.toml"));
    for case in &mut cases {
        if let (Some(server), Some(client)) = (&case.server, &mut case.client) {
            *client = client.replace("{same}", server);
        }
    }
    cases
}

/// Program of a subnet administrator.
pub(super) const ADMINISTRATOR: &str = "riser-sa";

/// Script in `{dir}` that starts ibacm and sends requests to it.
pub(super) const IBACM: &str = "ibacm.py";
