//! Initiator authentication. This also reads the secrets.

use std::collections::BTreeMap;

use riser_scsi::iscsi::chap;
use riser_scsi::iscsi::login::Auth;

use crate::config::{self, Chap};
use crate::server::ServerError;
use crate::sessions::catalog::TargetDef;

/// Secrets that have been read.
#[derive(Clone, Debug, Default)]
pub(super) struct Secrets {
    /// All secrets, by source.
    known: Vec<(Chap, Auth)>,
    /// Secrets used by the current catalog.
    used: Vec<(Chap, Auth)>,
    /// If set, known secrets are not read again.
    are_kept: bool,
}

impl Secrets {
    /// Sets whether known secrets are kept without reading them again. Therefore, a file that was
    /// removed or is being written is not a problem until the configuration is applied again.
    pub(super) fn set_kept(&mut self, are_kept: bool) {
        self.are_kept = are_kept;
    }

    /// Reads the secrets.
    ///
    /// # Errors
    /// [`ServerError::Secret`].
    pub(super) fn auth(&mut self, chap: Option<&Chap>) -> Result<Auth, ServerError> {
        let Some(chap) = chap else {
            return Ok(Auth::None);
        };
        let is_this = |(other, _): &&(Chap, Auth)| other == chap;
        // If the configuration is applied again, we read the files again. This is how secrets can
        // be changed.
        let mut known = self.known.iter().filter(|_| self.are_kept);
        let auth = match known.find(is_this) {
            Some((_, auth)) => auth.clone(),
            None => auth(Some(chap))?,
        };
        self.used.push((chap.clone(), auth.clone()));
        Ok(auth)
    }

    /// Returns the authentication for access rules with their own settings.
    ///
    /// # Errors
    /// [`ServerError::Secret`].
    pub(super) fn rule_auths(
        &mut self,
        access: &config::Access,
    ) -> Result<BTreeMap<usize, Auth>, ServerError> {
        let config::Access::Rules(rules) = access else {
            return Ok(BTreeMap::new());
        };
        let rules = rules.iter().enumerate();
        let own = rules.filter_map(|(n, rule)| Some((n, rule.chap.as_ref()?)));
        own.map(|(n, chap)| Ok((n, self.auth(Some(chap))?)))
            .collect()
    }

    /// Called when the catalog is complete. All other secrets are dropped.
    pub(super) fn drop_unused(&mut self) {
        // This also removes the secrets of deleted targets from memory.
        self.known = std::mem::take(&mut self.used);
    }
}

/// Reads the secrets of users and of the target.
pub(super) fn auth(chap: Option<&Chap>) -> Result<Auth, ServerError> {
    let Some(chap) = chap else {
        return Ok(Auth::None);
    };
    let read = |user: &config::ChapUser| {
        user.credentials().map_err(|source| ServerError::Secret {
            name: user.name.clone(),
            source,
        })
    };
    Ok(Auth::Chap {
        accepted: chap.users.iter().map(read).collect::<Result<_, _>>()?,
        own: chap.mutual.as_ref().map(read).transpose()?,
        algorithms: chap.algorithms.clone(),
    })
}

/// Checks that no initiator uses the same secret as the target (RFC 7143 9.2.1). Otherwise, an
/// initiator could let the target compute the response to a challenge from elsewhere. We can only
/// compare the secrets here, after reading them from their sources.
pub(super) fn check_secrets(discovery: &Auth, targets: &[TargetDef]) -> Result<(), ServerError> {
    let defs = targets.iter().filter_map(|target| target.iscsi.as_ref());
    let auths = defs.flat_map(|iscsi| iscsi.rule_auths.values().chain([&iscsi.auth]));
    let auths: Vec<&Auth> = auths.chain([discovery]).collect();
    auths.iter().try_for_each(|auth| check_own(auth, &auths))
}

/// Checks the target's secret in a CHAP configuration against the accepted secrets in all of them.
///
/// # Errors
/// [`ServerError::SameSecret`].
pub(crate) fn check_own(auth: &Auth, all: &[&Auth]) -> Result<(), ServerError> {
    let Auth::Chap { own: Some(own), .. } = auth else {
        return Ok(());
    };
    let mut accepted = all.iter().flat_map(|auth| match auth {
        Auth::Chap { accepted, .. } => accepted.as_slice(),
        Auth::None => &[],
    });
    match accepted.find(|user| chap::is_equal(&user.secret, &own.secret)) {
        None => Ok(()),
        Some(user) => {
            let (own, user) = (own.name.clone(), user.name.clone());
            Err(ServerError::SameSecret { own, user })
        }
    }
}
