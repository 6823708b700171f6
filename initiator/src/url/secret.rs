//! Passwords for addresses.

use std::fmt;
use std::path::{Path, PathBuf};

use riser_scsi::iscsi::chap::Credentials;
use serde::{Deserialize, Serialize};

/// Environment variable for the initiator password.
pub(super) const PASSWORD_ENV: &str = "RISER_CHAP_PASSWORD";

/// Environment variable for the target password.
pub(super) const TARGET_PASSWORD_ENV: &str = "RISER_CHAP_TARGET_PASSWORD";

/// Environment variables containing secrets. These must not be passed to other programs.
pub const SECRET_ENV: [&str; 2] = [PASSWORD_ENV, TARGET_PASSWORD_ENV];

/// Password. It is never printed by Debug or Display. It can be serialized, but this should only be
/// used for [`Secrets`].
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Creates a secret that is hidden in debug output.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the password in clear text.
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

/// Passwords removed from an address, to be sent to a process using a separate channel.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Secrets {
    pub(super) password: Option<Secret>,
    pub(super) target_password: Option<Secret>,
}

impl Secrets {
    /// Returns whether there are no passwords.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.password.is_none() && self.target_password.is_none()
    }
}

/// CHAP user, and where to get the password.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// CHAP_N, the user name.
    pub name: Option<String>,
    /// Password, if it's part of the address.
    pub password: Option<Secret>,
    /// File with the password in the first line.
    pub file: Option<PathBuf>,
}

/// Error if credentials are not available.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The file can't be read.
    #[error("cannot read the password file {}: {source}", path.display())]
    File {
        /// File path.
        path: PathBuf,
        /// File system error.
        source: std::io::Error,
    },
    /// No password for this user.
    #[error("missing password for user `{user}`; set it in {env} or in a file")]
    Missing {
        /// User name.
        user: String,
        /// Environment variable that can be used for it.
        env: &'static str,
    },
    /// The target can't be authenticated if the initiator isn't.
    #[error("missing user for the target user: mutual authentication requires both")]
    OneSided,
    /// Both sides use the same secret.
    #[error("user and target user have the same password: use different passwords")]
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
