//! CHAP checks: names, secrets and algorithms.

use riser_scsi::iscsi::chap::{ALGORITHMS, Algorithm};

use super::paths::whole_path;
use crate::mistake::{Checked, Mistake};
use crate::model::{Chap, ChapUser, SECRET_LEN, Secret};
use crate::raw;
use crate::yaml::Located;

pub(super) fn chap(path: &str, raw: Option<Located<raw::Chap>>) -> Checked<Option<Chap>> {
    let Some(raw) = raw else {
        return Ok(None);
    };
    if raw.value.users.is_empty() {
        let message = "missing `users`: with `chap` but no users, no initiator can log in";
        return Err(Mistake::new(raw.at, path, message));
    }
    let users = raw.value.users.into_iter().enumerate();
    let users = users
        .map(|(i, user)| chap_user(&format!("{path}.users[{i}]"), user))
        .collect::<Checked<Vec<_>>>()?;
    let own_path = format!("{path}.mutual");
    let own_at = raw.value.mutual.as_ref().map(|own| own.at);
    let own = raw.value.mutual.map(|own| chap_user(&own_path, own));
    let mutual = own.transpose()?;
    if let (Some(own), Some(at)) = (&mutual, own_at)
        && users.iter().any(|user| user.secret == own.secret)
    {
        let message = "same secret for both directions: each side could impersonate the other";
        return Err(Mistake::new(at, own_path, message));
    }
    let algorithms = chap_algorithms(&format!("{path}.algorithms"), raw.value.algorithms)?;
    Ok(Some(Chap {
        users,
        mutual,
        algorithms,
    }))
}

fn chap_algorithms(
    path: &str,
    raw: Option<Located<Vec<Located<String>>>>,
) -> Checked<Vec<Algorithm>> {
    let Some(list) = raw else {
        return Ok(ALGORITHMS.to_vec());
    };
    if list.value.is_empty() {
        let message = "missing algorithms: no initiator could log in";
        return Err(Mistake::new(list.at, path, message));
    }
    let named = list.value.iter().map(|name| {
        let found = ALGORITHMS.into_iter().find(|a| a.name() == name.value);
        found.ok_or_else(|| {
            let names = ALGORITHMS.map(Algorithm::name).join(", ");
            Mistake::new(name.at, path, format!("must be one of {names}"))
        })
    });
    named.collect()
}

fn chap_user(path: &str, raw: Located<raw::ChapUser>) -> Checked<ChapUser> {
    let user = raw.value;
    let wrong = |message: &str| Mistake::new(raw.at, path, message);
    if user.name.is_empty() || user.name.len() > 255 || user.name.chars().any(char::is_control) {
        return Err(wrong(
            "a CHAP name must have 1 to 255 characters, without control characters",
        ));
    }
    let credential = user.secret_credential.map(Secret::Credential);
    let mut given = [
        user.secret.map(Secret::Inline),
        user.secret_file.map(|file| Secret::File(file.into())),
        user.secret_env.map(Secret::Env),
        credential,
    ]
    .into_iter()
    .flatten();
    let (Some(secret), None) = (given.next(), given.next()) else {
        let ways = "`secret`, `secret_file`, `secret_env` or `secret_credential`";
        return Err(wrong(&format!("exactly one of {ways} is required")));
    };
    let is_env = |name: &str| !name.is_empty() && !name.contains(['=', '\0']);
    // Same rule as in systemd: a single path component.
    let is_file = |name: &str| is_env(name) && !name.contains('/') && name != "." && name != "..";
    match &secret {
        Secret::Inline(secret) if !SECRET_LEN.contains(&secret.len()) => {
            return Err(wrong("a secret must have 12 to 255 bytes"));
        }
        Secret::File(file) if file.as_os_str().is_empty() => {
            return Err(wrong("`secret_file` must be a path"));
        }
        Secret::File(file) => {
            whole_path(&file.to_string_lossy(), raw.at, path)?;
        }
        Secret::Env(name) if !is_env(name) => {
            return Err(wrong(
                "`secret_env` must be the name of an environment variable",
            ));
        }
        Secret::Credential(name) if !is_file(name) => {
            return Err(wrong("`secret_credential` must be a file name without `/`"));
        }
        _ => {}
    }
    Ok(ChapUser {
        name: user.name,
        secret,
    })
}
