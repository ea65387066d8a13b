"""Owns users' messages and their ended replies: accepts, assembles, archives.

sending(S)        the way of one message into its lane       verbs(S)     get, cancel, delete, withdraw ...
contexts(S)       a message's history, as pieces of ids      assembly(P)  pieces into one context, inside the budget
conversations(S)  the line of replies a message joins        template(E)  the chat template, in jinja2's sandbox
archive(S)        ended replies into rows                    prompts(E)   the models' tokenizers and templates
guards(S)         outbox, sweeper, purges: what a crash left half done
store(E)          rows in PostgreSQL: rows(P), migrations    replies(P)   a reply's states as a table
key_store(E)      API keys                                   marks(S)     requests known to be in their lanes
"""
