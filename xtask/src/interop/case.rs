//! The cases: scripts in `tests/vm/cases`, and what their heads say.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::{Failure, root};

/// One case: a script and what its head says.
pub(crate) struct Case {
    /// Name of the script without its ending.
    pub(crate) name: String,
    /// Cases of a group may share a boot.
    pub(crate) group: String,
    /// Purpose of the case, in a line.
    pub(crate) about: String,
    /// Longest time of the case, without the boot.
    pub(crate) limit: Duration,
    /// The case runs with the tests.
    pub(crate) short: bool,
    /// The case measures, so no other guest may run beside it.
    pub(crate) alone: bool,
    /// The case runs on this machine, without a guest.
    pub(crate) here: bool,
    /// Smallest number of packets in its captures; none if it has no capture, or an empty one.
    pub(crate) packets: Option<u64>,
    /// Number of rounds of a case that goes round, in `limit`.
    pub(crate) rounds: Option<u32>,
    /// Text of the script.
    pub(crate) text: String,
}

/// The least number of packets where the head has none.
const PACKETS: u64 = 20;

impl Case {
    /// Reads the `#:` lines of a script.
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
        let needed = |name: &str| field(name).ok_or_else(|| format!("no line '#: {name}: …'"));
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
            text: text.clone(),
        })
    }

    /// The same case with another number of rounds, if it goes round, and as much time for each.
    pub(crate) fn with_rounds(mut self, rounds: u32) -> Self {
        if let Some(usual) = self.rounds {
            self.limit = (self.limit / usual * rounds).max(self.limit);
            self.rounds = Some(rounds);
        }
        self
    }

    fn is_named_by(&self, words: &[String]) -> bool {
        words.is_empty()
            || words
                .iter()
                .any(|w| self.name.contains(w.as_str()) || self.group == *w)
    }
}

/// Reads the cases that the words name (all, without words), in the order of group and name.
pub(crate) fn load(words: &[String], short: bool) -> Result<Vec<Case>, Failure> {
    let mut cases = Vec::new();
    for entry in fs::read_dir(root().join("tests/vm/cases"))? {
        let script = entry?.path();
        if script.extension().is_some_and(|e| e == "sh") {
            cases.push(Case::read(&script)?);
        }
    }
    cases.sort_by(|a, b| (&a.group, &a.name).cmp(&(&b.group, &b.name)));
    // A mistyped word beside others would only make the run shorter.
    for word in words {
        if !cases
            .iter()
            .any(|c| c.is_named_by(std::slice::from_ref(word)))
        {
            return Err(
                format!("no case has the name or group \"{word}\"; --list names them").into(),
            );
        }
    }
    cases.retain(|c| (!short || c.short) && c.is_named_by(words));
    if cases.is_empty() {
        return Err("no short case of that name; --list names them".into());
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_no_case_is_a_failure() {
        let load = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            load(&words, false)
        };
        assert!(load(&["iser"]).is_ok());
        let why = load(&["iser", "no-such-case"]).err().unwrap().to_string();
        assert!(why.contains("\"no-such-case\""), "{why}");
    }

    #[test]
    fn a_head_says_what_a_case_is() {
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
        assert!(case.is_named_by(&[]) && case.is_named_by(&["srp".to_owned()]));
        assert!(!case.is_named_by(&["rping".to_owned()]));
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
        let lacks = Case::parse("x", "#: group: srp\n#: limit: 60\n".to_owned());
        assert!(lacks.is_err_and(|e| e.to_string().contains("about")));
    }
}
