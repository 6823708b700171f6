//! Reads CHAP credentials from a tree and checks if `riserd` would accept them.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

use crate::rules::Tree;
use crate::tree::NodeId;

/// Allowed length of a secret in `riserd`, in bytes. LIO also accepts shorter secrets.
const SECRET_LEN: RangeInclusive<usize> = 12..=255;

/// Maximum length of a name in bytes.
const MAX_NAME: usize = 255;

/// User name and secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Credentials {
    pub(super) name: String,
    pub(super) secret: String,
}

/// Credentials of both the initiator and the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: Credentials,
    pub(super) mutual: Option<Credentials>,
}

/// Result of checking the credentials in an `auth` or `discovery_auth` directory.
#[derive(Debug)]
pub(super) enum CheckedLogin {
    /// The user name is not set.
    None,
    /// The credentials of this user can't be used. Contains the reason.
    Unusable(String),
    /// The credentials can be used. If the mutual credentials can't be used, this contains the
    /// reason.
    Usable(Login, Option<String>),
}

/// Reads names and secrets from an `auth` or `discovery_auth` directory.
pub(super) fn login(tree: &Tree, auth: NodeId) -> CheckedLogin {
    let pair = |name, secret| {
        let value = |key| Some(tree.value(auth, key)).filter(|v| !v.is_empty() && *v != "NULL");
        Some(Credentials {
            name: value(name)?.to_owned(),
            secret: value(secret)?.to_owned(),
        })
    };
    let Some(user) = pair("userid", "password") else {
        return CheckedLogin::None;
    };
    if let Err(reason) = check(&user) {
        return CheckedLogin::Unusable(reason);
    }
    let mutual = pair("userid_mutual", "password_mutual");
    let checked = mutual.as_ref().map_or(Ok(()), |mutual| {
        check(mutual)?;
        match mutual.secret == user.secret {
            true => Err("the mutual secret is the same as that of the initiator".to_owned()),
            false => Ok(()),
        }
    });
    match checked {
        Ok(()) => CheckedLogin::Usable(Login { user, mutual }, None),
        Err(reason) => CheckedLogin::Usable(Login { user, mutual: None }, Some(reason)),
    }
}

fn check(user: &Credentials) -> Result<(), String> {
    let Credentials { name, secret } = user;
    if name.len() > MAX_NAME || name.chars().any(char::is_control) {
        return Err(format!("invalid CHAP user name `{}`", name.escape_debug()));
    }
    match SECRET_LEN.contains(&secret.len()) {
        true => Ok(()),
        false => Err(format!(
            "the CHAP secret of user `{name}` has {} bytes, and riserd requires {} to {}",
            secret.len(),
            SECRET_LEN.start(),
            SECRET_LEN.end()
        )),
    }
}

/// Returns the value to use for `chap` in the document.
pub(super) fn chap(login: &Login) -> Value {
    let user = |user: &Credentials| json!({ "name": user.name, "secret": user.secret });
    let mut doc = json!({ "users": [user(&login.user)] });
    if let Some(mutual) = &login.mutual {
        doc["mutual"] = user(mutual);
    }
    doc
}
