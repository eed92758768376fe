//! Checks the rules of the election against the true time and the server's own history.

use std::collections::BTreeMap;

use cadastre_controller::cluster::lease::{LeadershipTerm, Mono, Takeover};

use crate::server::{Server, TermStart, Time};

/// A process that leads, and the end of its leadership in true time.
struct Leader {
    process: usize,
    term: String,
    until: Time,
    /// Whether this process could not know, when its term began, that another process still led, or this is that other
    /// process. Such a process may lead beside others, because a later candidate does not know of both.
    undetectable: bool,
}

/// What the checks need to know about a process that leads.
pub struct LeaderFacts<'a> {
    pub process: usize,
    pub holder: &'a str,
    /// Whether the process had seen a Lease when it sent its last successful write
    pub has_seen: bool,
    /// Until when the process may write after its last write that took effect while it held the Lease, by the process's
    /// own clock.
    pub allowed_until: Mono,
    /// When the process sent its last write that took effect while it held the Lease, in true time.
    pub last_write_sent: Time,
}

#[derive(Default)]
pub struct Checks {
    leaders: Vec<Leader>,
    /// The holder of every term so far, by term.
    holders: BTreeMap<String, String>,
    pub undetectable: u64,
    pub resumed: u64,
    pub takeovers: [u64; 3],
}

impl Checks {
    /// Records that this process leads at most until `until`, in true time. Checks that no other process leads in that
    /// time.
    pub fn leads(
        &mut self,
        facts: &LeaderFacts,
        leading: &LeadershipTerm,
        until: Time,
        server: &Server,
        now: Time,
    ) {
        let bound = facts.allowed_until;
        assert!(
            leading.valid_until <= bound,
            "{} may write until {:?}, but its last renewal allows {bound:?}",
            facts.holder,
            leading.valid_until
        );
        let of_process = |it: &Leader| it.process == facts.process;
        let known = self.leaders.iter().position(of_process);
        let index = known.filter(|index| self.leaders[*index].term == *leading.id);
        let index = index.unwrap_or_else(|| {
            self.leads_no_more(facts.process);
            self.begin(facts, leading, server)
        });
        let leader = &mut self.leaders[index];
        if leader.until <= now && until > now && leader.until > 0 {
            self.resumed += 1;
        }
        leader.until = until;
        let (term, undetectable) = (&*leading.id, leader.undetectable);
        for other in &self.leaders {
            let both = other.process != facts.process && other.until > now && until > now;
            assert!(
                !both || undetectable || other.undetectable,
                "{term} and {} lead at once",
                other.term
            );
        }
    }

    fn begin(&mut self, facts: &LeaderFacts, leading: &LeadershipTerm, server: &Server) -> usize {
        let (term, holder) = (leading.id.to_string(), facts.holder.to_owned());
        let before = self.holders.insert(term.clone(), holder.clone());
        assert!(before.is_none(), "the term {term} comes twice: {before:?}");
        let transitions = term.split_once('-').unwrap().0.parse().unwrap();
        let start = server.term_starts.get(&(holder, transitions)).copied();
        let start = start.unwrap_or_else(|| panic!("{term} leads, but never held the Lease"));
        let expected = match start.takeover {
            Takeover::First if server.deleted.is_some_and(|at| at < start.at) && facts.has_seen => {
                Takeover::Unclean
            }
            other => other,
        };
        // If a process saw the Lease and still created a new one, it must not report a first start. It may always
        // report an unclean start instead of a first start, because an unclean start only costs a fence.
        let cautious = start.created && leading.takeover == Takeover::Unclean;
        assert!(
            leading.takeover == expected || cautious,
            "{term} calls its beginning {:?}, it was {expected:?}",
            leading.takeover
        );
        self.takeovers[leading.takeover as usize] += 1;
        let undetectable = Self::is_undetectable(facts, start, server);
        self.undetectable += u64::from(undetectable);
        for other in self.leaders.iter_mut().filter(|_| undetectable) {
            other.undetectable = true;
        }
        self.leaders.push(Leader {
            process: facts.process,
            term,
            until: 0,
            undetectable,
        });
        self.leaders.len() - 1
    }

    /// Returns whether the new leader could not know, when its term began, that another process still led. This is so
    /// if the Lease was deleted, and the new leader created the Lease by a write that it had sent too early. The write
    /// was too early if the leader sent it before the deletion, or before it had ever seen a Lease. Two processes are
    /// allowed to lead at once only in this case.
    fn is_undetectable(facts: &LeaderFacts, start: TermStart, server: &Server) -> bool {
        server.deleted.is_some_and(|deleted| {
            let is_late = start.created && start.at > deleted;
            is_late && (!facts.has_seen || facts.last_write_sent < deleted)
        })
    }

    /// Records that a process no longer leads, or has ended.
    pub fn leads_no_more(&mut self, process: usize) {
        self.leaders.retain(|leader| leader.process != process);
    }

    /// Returns the processes that lead at the time `now`, with their terms.
    pub fn leaders(&self, now: Time) -> Vec<(usize, &str)> {
        let valid = self.leaders.iter().filter(|leader| leader.until > now);
        valid
            .map(|leader| (leader.process, &*leader.term))
            .collect()
    }
}
