//! Groups runs into cases and names them.

use std::collections::BTreeMap;

use crate::outcome::Outcome;
use crate::output::show;
use crate::output::summary::total_ios;

/// Name, disk and options of a run.
type Key<'a> = (&'a str, String, &'a [(String, String)]);

/// Groups runs with the same name, disk and options as rounds of a case, and assigns a label to
/// each case. Runs without operations are not included.
pub(super) fn cases(outcomes: &[Outcome]) -> Vec<(String, Vec<&Outcome>)> {
    let mut order: Vec<(String, Vec<&Outcome>)> = Vec::new();
    let mut known: BTreeMap<Key<'_>, usize> = BTreeMap::new();
    for outcome in outcomes.iter().filter(|o| total_ios(o) > 0) {
        let options = show::options(&outcome.options);
        let label = format!("{} {options} {}", outcome.name, outcome.disk());
        // Don't use the label as the key, because long options are truncated.
        let key = (outcome.name.as_str(), outcome.disk(), &outcome.options[..]);
        match known.get(&key) {
            Some(i) => order[*i].1.push(outcome),
            None => {
                known.insert(key, order.len());
                order.push((label, vec![outcome]));
            }
        }
    }
    let labels = labels(order.iter().map(|(label, _)| label.as_str()));
    for ((name, runs), label) in order.iter_mut().zip(labels) {
        *name = match label.as_str() {
            "" => runs[0].name.clone(),
            _ => label,
        };
    }
    if let [(name, runs)] = &mut order[..] {
        name.clone_from(&runs[0].name);
    }
    order
}

/// Returns the words of each name that are not in all other names.
pub(super) fn labels<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let names: Vec<Vec<&str>> = names.map(|name| name.split(' ').collect()).collect();
    let common = |word: &str| names.len() > 1 && names.iter().all(|name| name.contains(&word));
    let label = |name: &Vec<&str>| {
        let own: Vec<_> = name.iter().copied().filter(|word| !common(word)).collect();
        own.join(" ")
    };
    names.iter().map(label).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::sample;

    #[test]
    fn rounds_share_case() {
        let found = [sample::mixed("a", 1), sample::mixed("a", 2)];
        let found = cases(&found);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0.as_str(), found[0].1.len()), ("a", 2));
    }

    #[test]
    fn hidden_options_separate_cases() {
        let with = |seed: &str| {
            let long = ("bssplit".to_owned(), "4k/1:".repeat(200));
            let last = ("randseed".to_owned(), seed.to_owned());
            Outcome {
                options: vec![long, last],
                ..sample::mixed("a", 1)
            }
        };
        let outcomes = [with("1"), with("2"), with("1")];
        assert_eq!(
            show::options(&outcomes[0].options),
            show::options(&outcomes[1].options),
            "what differs is cut off"
        );
        let rounds: Vec<_> = cases(&outcomes)
            .iter()
            .map(|(_, runs)| runs.len())
            .collect();
        assert_eq!(rounds, [2, 1]);
    }

    #[test]
    fn disks_separate_cases() {
        let mut outcomes = [sample::mixed("a", 1), sample::mixed("a", 2)];
        outcomes[1].address = "nbd://127.0.0.1/disk".into();
        let found = cases(&outcomes);
        let labels: Vec<_> = found.iter().map(|(label, _)| label.as_str()).collect();
        assert_eq!(labels, ["srp://127.0.0.1/disk/0", "nbd://127.0.0.1/disk"]);
    }
}
