#!/bin/sh
# A cluster to look after: what works on this node, what runs there, and why it waits.

hororing info                                     # libraries, limits, networks
hororun -np 2 python ddp_script.py                # does a job of two ranks run?
hororing doctor                                   # this user's ranks here: what each of them waits for
hororing page --port 8088 &                       # a page about them; alerts read /metrics there
page=$!
sleep 2
kill $page
