//! Test cases, which are scripts in `tests/vm/cases` with options in the header.

use std::fs;
use std::path::Path;
use std::time::Duration;

use riser_testkit::captures::Expected;

use crate::cases::select;
use crate::{Failure, root};

/// A test case: the script, and the options in its header.
pub(crate) struct Case {
    /// Name of the script without its extension.
    pub(crate) name: String,
    /// Cases in the same group can share a boot.
    pub(crate) group: String,
    /// Description of the case in a single line.
    pub(crate) about: String,
    /// Maximum time for this case, not including the boot.
    pub(crate) limit: Duration,
    /// Set if this case is also run with the tests.
    pub(crate) short: bool,
    /// Set if this case measures performance, so that no other guest should run at the same time.
    pub(crate) alone: bool,
    /// Set if this case is run on this machine instead of in a guest.
    pub(crate) here: bool,
    /// Minimum number of packets in a capture. `None` if there is no capture or it can be empty.
    pub(crate) packets: Option<u64>,
    /// Number of rounds to run within `limit`, if supported by this case.
    pub(crate) rounds: Option<u32>,
    /// Number of times to boot a guest with systemd. After each boot, the script is run once,
    /// and `limit` is the maximum time for each run.
    pub(crate) boots: Option<u32>,
    pub(crate) text: String,
}

/// Minimum number of packets if not set in the header.
const PACKETS: u64 = 20;

impl Case {
    fn read(script: &Path) -> Result<Self, Failure> {
        let text = fs::read_to_string(script)?;
        let name = script.file_stem().unwrap_or_default().to_string_lossy();
        Self::parse(&name, text).map_err(|e| format!("{}: {e}", script.display()).into())
    }

    fn parse(name: &str, text: String) -> Result<Self, Failure> {
        let field = |name: &str| {
            text.lines()
                .find_map(|l| {
                    l.strip_prefix("#: ")?
                        .strip_prefix(name)?
                        .strip_prefix(": ")
                })
                .map(str::trim)
        };
        let needed = |name: &str| field(name).ok_or_else(|| format!("missing line '#: {name}: …'"));
        Ok(Self {
            name: name.to_owned(),
            group: needed("group")?.to_owned(),
            about: needed("about")?.to_owned(),
            limit: Duration::from_secs(needed("limit")?.parse()?),
            short: field("short") == Some("yes"),
            alone: field("alone") == Some("yes"),
            here: field("here") == Some("yes"),
            packets: match field("packets") {
                Some("none") => None,
                Some(least) => Some(least.parse()?),
                None => Some(PACKETS),
            },
            rounds: field("rounds").map(str::parse).transpose()?,
            boots: field("boots").map(str::parse).transpose()?,
            text: text.clone(),
        })
    }

    /// Sets the number of rounds, if supported by this case. The time per round is not changed.
    pub(crate) fn with_rounds(mut self, rounds: u32) -> Self {
        if let Some(usual) = self.rounds {
            self.limit = (self.limit / usual * rounds).max(self.limit);
            self.rounds = Some(rounds);
        }
        self
    }

    pub(crate) fn expected(&self) -> Expected {
        Expected {
            least: self.packets,
            // iWARP messages are part of a stream, and the capture doesn't contain enough data to
            // parse them.
            is_iser: self.name.contains("iser") && self.group != "iwarp",
            is_kernel_only: self.text.contains("CORE=yes"),
        }
    }

    pub(crate) fn path(&self) -> String {
        format!("{}/{}", self.group, self.name)
    }

    fn is_named_by(&self, word: &str) -> bool {
        self.name.contains(word) || self.group == word
    }
}

pub(crate) fn load(words: &[String], short: bool) -> Result<Vec<Case>, Failure> {
    let mut cases = Vec::new();
    for entry in fs::read_dir(root().join("tests/vm/cases"))? {
        let script = entry?.path();
        if script.extension().is_some_and(|e| e == "sh") {
            cases.push(Case::read(&script)?);
        }
    }
    cases.sort_by(|a, b| (&a.group, &a.name).cmp(&(&b.group, &b.name)));
    let mut cases = select(cases, words, "case", Case::is_named_by)?;
    cases.retain(|case| !short || case.short);
    if cases.is_empty() {
        return Err("unknown short case; --list shows all cases".into());
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_case_name_fails() {
        let load = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            load(&words, false)
        };
        assert!(load(&["iser"]).is_ok());
        let why = load(&["iser", "no-such-case"]).err().unwrap().to_string();
        assert!(why.contains("\"no-such-case\""), "{why}");
    }

    #[test]
    fn case_header_is_parsed() {
        let text = "#: group: srp\n#: about: it works\n#: limit: 60\n#: alone: yes\ntrue\n";
        let case = Case::parse("x", text.to_owned()).unwrap();
        assert_eq!(
            (case.group.as_str(), case.about.as_str()),
            ("srp", "it works")
        );
        assert_eq!(case.limit, Duration::from_secs(60));
        assert!(case.alone && !case.short && !case.here);
        let here = Case::parse("x", format!("#: here: yes\n{text}")).unwrap();
        assert!(here.here);
        assert!(case.is_named_by("srp") && !case.is_named_by("rping"));
        assert_eq!(case.packets, Some(PACKETS));
        let packets = |least: &str| {
            let text = format!("{text}#: packets: {least}\n");
            Case::parse("x", text).map(|case| case.packets)
        };
        assert_eq!(packets("none").unwrap(), None);
        assert_eq!(packets("4").unwrap(), Some(4));
        assert!(packets("few").is_err());
        let round = format!("{text}#: rounds: 12\n");
        let case = Case::parse("x", round).unwrap();
        assert_eq!(
            (case.rounds, case.limit),
            (Some(12), Duration::from_secs(60))
        );
        let case = case.with_rounds(24);
        assert_eq!(
            (case.rounds, case.limit),
            (Some(24), Duration::from_secs(120))
        );
        let plain = Case::parse("x", text.to_owned()).unwrap().with_rounds(24);
        assert_eq!((plain.rounds, plain.limit), (None, Duration::from_secs(60)));
        assert_eq!(plain.boots, None);
        let boots = Case::parse("x", format!("{text}#: boots: 3\n")).unwrap();
        assert_eq!(boots.boots, Some(3));
        let lacks = Case::parse("x", "#: group: srp\n#: limit: 60\n".to_owned());
        assert!(lacks.is_err_and(|e| e.to_string().contains("about")));
    }
}
