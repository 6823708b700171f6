//! Authentication of initiators, with secrets that are read here.

use std::collections::BTreeMap;

use riser_scsi::iscsi::chap;
use riser_scsi::iscsi::login::Auth;

use crate::config::{self, Chap};
use crate::server::ServerError;
use crate::sessions::catalog::TargetDef;

/// Secrets that were read.
#[derive(Clone, Debug, Default)]
pub(super) struct Secrets {
    /// By where they were read from.
    known: Vec<(Chap, Auth)>,
    /// Those that the present catalog takes.
    used: Vec<(Chap, Auth)>,
    /// True if secrets that are known are not read again.
    are_kept: bool,
}

impl Secrets {
    /// From now on, what is known is not read again, or the other way round. A file that cannot be
    /// read any more, or that is being written, is no matter as long as the configuration is not
    /// applied again.
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
        // Where the configuration is applied again, files are read again: that is how secrets are
        // changed.
        let mut known = self.known.iter().filter(|_| self.are_kept);
        let auth = match known.find(is_this) {
            Some((_, auth)) => auth.clone(),
            None => auth(Some(chap))?,
        };
        self.used.push((chap.clone(), auth.clone()));
        Ok(auth)
    }

    /// Authentication that access rules ask for in the place of the target's.
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

    /// The catalog has all that it takes; the others are forgotten.
    pub(super) fn settle(&mut self) {
        // Secrets that no target uses any longer leave memory with this.
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

/// The secret with which the target authenticates itself is accepted from no initiator (RFC 7143
/// 9.2.1): otherwise an initiator could have the target compute the response to a challenge that it
/// got elsewhere. The secrets are compared here because they have only now been read from their
/// sources.
pub(super) fn check_secrets(discovery: &Auth, targets: &[TargetDef]) -> Result<(), ServerError> {
    let defs = targets.iter().filter_map(|target| target.iscsi.as_ref());
    let auths = defs.flat_map(|iscsi| iscsi.rule_auths.values().chain([&iscsi.auth]));
    let auths: Vec<&Auth> = auths.chain([discovery]).collect();
    auths.iter().try_for_each(|auth| check_own(auth, &auths))
}

/// Checks the target's own secret of one configuration of CHAP against what all of them accept.
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
