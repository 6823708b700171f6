//! Table of runs.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::escape::escape;
use crate::outcome::{OpKind, Outcome};
use crate::output::summary::{active, latencies};
use crate::output::{show, text};

/// Adds the table, followed by notes about runs.
pub(super) fn runs(page: &mut String, outcomes: &[Outcome]) {
    page.push_str(
        "<h2>Runs</h2>\n<div class=\"scroll\"><table><caption>Rates are means of the whole \
         measurement.</caption>\n<thead><tr><th scope=\"col\">#</th>\
         <th class=\"t\" scope=\"col\">Job</th>",
    );
    let with_disks = have_several_disks(outcomes);
    if with_disks {
        page.push_str("<th class=\"t\" scope=\"col\">Disk</th>");
    }
    page.push_str(
        "<th class=\"t\" scope=\"col\">Options</th><th class=\"t\" scope=\"col\">Kind</th>",
    );
    for head in [
        "IOPS",
        "Bandwidth",
        "Mean",
        "p50",
        "p99",
        "p99.9",
        "Max",
        "Time",
    ] {
        let _ = write!(page, "<th scope=\"col\">{head}</th>");
    }
    page.push_str("</tr></thead>\n<tbody>\n");
    for (i, outcome) in outcomes.iter().enumerate() {
        for kind in active(outcome) {
            head(page, i + 1, outcome, with_disks);
            row(page, outcome, kind);
        }
        if active(outcome).next().is_none() {
            head(page, i + 1, outcome, with_disks);
            page.push_str("<td class=\"k\" colspan=\"9\">no operation completed</td></tr>\n");
        }
    }
    page.push_str("</tbody></table></div>\n");
    notes(page, outcomes);
}

/// Returns whether there are multiple disks, so that each run must name its disk.
pub(super) fn have_several_disks(outcomes: &[Outcome]) -> bool {
    outcomes.iter().any(|o| o.disk() != outcomes[0].disk())
}

fn head(page: &mut String, number: usize, outcome: &Outcome, with_disk: bool) {
    let name = escape(&show::printable(&outcome.name));
    let _ = write!(
        page,
        "<tr><td>{number}</td><th class=\"t\" scope=\"row\">{name}</th>"
    );
    if with_disk {
        let disk = escape(&show::printable(&outcome.disk()));
        let _ = write!(page, "<td class=\"t\">{disk}</td>");
    }
    let options = escape(&show::options(&outcome.options));
    let _ = write!(page, "<td class=\"t\">{options}</td>");
}

fn row(page: &mut String, outcome: &Outcome, kind: OpKind) {
    let latencies = latencies(outcome.of(kind));
    let at = |percent| show::time(latencies.value_at_percentile(percent) as f64);
    let _ = write!(page, "<td class=\"k\">{}</td>", kind.name());
    for value in [
        show::count(outcome.iops(kind)),
        text::bandwidth(outcome, kind),
        show::time(latencies.mean()),
        at(50.0),
        at(99.0),
        at(99.9),
        show::time(latencies.max() as f64),
        format!("{:.1} s", outcome.runtime.as_secs_f64()),
    ] {
        let _ = write!(page, "<td>{value}</td>");
    }
    page.push_str("</tr>\n");
}

/// Adds notes, and the numbers of the runs they refer to.
fn notes(page: &mut String, outcomes: &[Outcome]) {
    let mut notes: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (i, outcome) in outcomes.iter().enumerate() {
        for note in text::notes(outcome) {
            notes.entry(note).or_default().push((i + 1).to_string());
        }
    }
    for (note, runs) in notes {
        let class = if note.starts_with("warning") {
            "warn"
        } else {
            "soft"
        };
        let (about, runs) = (
            if runs.len() == 1 { "Run" } else { "Runs" },
            runs.join(", "),
        );
        let _ = writeln!(
            page,
            "<p class=\"{class}\">{about} {runs}: {}</p>",
            escape(&note)
        );
    }
}
