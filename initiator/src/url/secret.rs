//! Passwords of addresses.

use std::fmt;
use std::path::{Path, PathBuf};

use riser_scsi::iscsi::chap::Credentials;
use serde::{Deserialize, Serialize};

/// Environment variable with the password of the initiator.
pub(super) const PASSWORD_ENV: &str = "RISER_CHAP_PASSWORD";

/// Environment variable with the password that the target has to know.
pub(super) const TARGET_PASSWORD_ENV: &str = "RISER_CHAP_TARGET_PASSWORD";

/// Environment variables that hold secrets, not to be handed to other programs.
pub const SECRET_ENV: [&str; 2] = [PASSWORD_ENV, TARGET_PASSWORD_ENV];

/// A password. Neither Debug nor Display of anything shows it; serialization does, and is for
/// [`Secrets`] only.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Wraps a password, which debug output hides.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Password in clear text.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The passwords of an address, to be handed to a process by a channel of its own.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Secrets {
    pub(super) password: Option<Secret>,
    pub(super) target_password: Option<Secret>,
}

impl Secrets {
    /// Returns whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.password.is_none() && self.target_password.is_none()
    }
}

/// A name for CHAP, and the place of its password.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// CHAP_N, the user's name.
    pub name: Option<String>,
    /// Password, if it is in the address.
    pub password: Option<Secret>,
    /// A file whose first line is the password.
    pub file: Option<PathBuf>,
}

/// Reason for credentials to be missing.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file cannot be read.
    #[error("cannot read the password file {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error of the file system.
        source: std::io::Error,
    },
    /// A user without a password.
    #[error("there is no password for user `{user}`; give it in {env} or in a file")]
    Missing {
        /// Name of the user.
        user: String,
        /// The environment variable that could hold it.
        env: &'static str,
    },
    /// The target has to prove itself to an initiator that does not.
    #[error(
        "a target user is given, but no user: a target proves itself only to an initiator that does"
    )]
    OneSided,
    /// Both sides have one secret.
    #[error("user and target user have the same password: each needs its own")]
    Same,
}

impl User {
    pub(super) fn credentials(
        &self,
        env: &'static str,
    ) -> Result<Option<Credentials>, SecretError> {
        let Some(name) = &self.name else {
            return Ok(None);
        };
        let secret = match (&self.password, &self.file) {
            (Some(password), _) => password.0.clone(),
            (None, Some(path)) => first_line(path)?,
            (None, None) => std::env::var(env).map_err(|_| SecretError::Missing {
                user: name.clone(),
                env,
            })?,
        };
        Ok(Some(Credentials {
            name: name.clone(),
            secret: secret.into_bytes(),
        }))
    }
}

fn first_line(path: &Path) -> Result<String, SecretError> {
    let text = std::fs::read_to_string(path).map_err(|source| SecretError::File {
        path: path.to_owned(),
        source,
    })?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
